"""The KV memory of requests that decode together, before they are read."""

import math
from collections.abc import Iterable
from typing import Any

from ..errors import SnapKVError
from ..planning.config import CompressionConfig
from ..planning.entry_sizes import EntrySizes
from ..planning.footprint import Footprint, Need
from ..planning.prompt_plan import PREFILL_STEP_SIZE
from ..planning.units import format_bytes


class NeverFits(SnapKVError):
    """A request needs more memory than there will ever be."""


class Memory:
    """The KV memory of a batch, `limit` bytes; `options` are those of its `CompressedBatchGenerator`."""

    def __init__(self, model, options: dict[str, Any], limit: int):
        config, _ = CompressionConfig.taken_from(options)
        step_size = options.get("prefill_step_size", PREFILL_STEP_SIZE)
        self._footprint, self.limit = Footprint(EntrySizes(model), config, step_size), limit

    def need(self, n_prompt: int, max_tokens: int) -> Need:
        """What a request takes. Raises: NeverFits: more than the limit; SnapKVError: the policy can't serve it."""
        plan = self._footprint.plan(n_prompt, max_tokens)
        found = self._footprint.need(plan, max_tokens)
        if found.most > self.limit:
            raise NeverFits(
                f"its {n_prompt} prompt tokens and {max_tokens} of the answer need {format_bytes(found.most)} of KV "
                f"memory, and max_kv_bytes is {format_bytes(self.limit)}: raise it"
            )
        return found

    def admit(self, new: Need, active: Iterable[Any], held: int) -> int | None:
        """Bytes that are taken at most once another request is admitted; None if it has to wait. Those active have a
        `need`, and a `report` once their prompts have been compressed; their caches `held` so many bytes."""
        active = [request for request in active if request.need is not None]
        beside = sum(r.need.reading if r.report is None else r.need.stays for r in active)
        planned = self._together([*(r.need for r in active), new]) + beside + new.reading
        taken = max(held + new.most, planned)
        return None if active and taken > self.limit else taken

    def _together(self, needs: list[Need]) -> int:
        """Bytes of requests that decode together.

        Those of a group have equally many rows, as many as the longest; mlx-lm's one batch is a group, and others are
        made of caches within a power of two, before room for more is added.
        """
        total = 0
        for fixed, most in ((True, 2), (False, 4)):
            padded = math.inf if self._footprint.config.setting is None else most
            group = [need.held for need in needs if need.fixed == fixed]
            total += sum(int(min(padded * held, max(group))) for held in group)
        return total
