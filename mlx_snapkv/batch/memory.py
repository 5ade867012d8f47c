"""Decide whether a batch has KV memory for another request, before the request's prompt is read."""

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
    """A request needs more than the whole limit."""


class Memory:
    """The KV memory of a batch.

    Args:
        sizes: sizes of the model's entries.
        options: the keywords of the batch's `CompressedBatchGenerator`.
        limit: bytes of KV memory.
    """

    def __init__(self, sizes: EntrySizes, options: dict[str, Any], limit: int):
        config, _ = CompressionConfig.taken_from(options)
        step_size = options.get("prefill_step_size", PREFILL_STEP_SIZE)
        self._footprint, self.limit = Footprint(sizes, config, step_size), limit

    def need(self, n_prompt: int, max_tokens: int) -> Need:
        """Return the memory that a request needs.

        Raises:
            NeverFits: the request needs more than the limit.
            SnapKVError: the policy can't serve it.
        """
        plan = self._footprint.plan(n_prompt, max_tokens)
        need = self._footprint.need(plan, max_tokens)
        if need.most > self.limit:
            raise NeverFits(
                f"its {n_prompt} prompt tokens and {max_tokens} of the answer need {format_bytes(need.most)} of KV "
                f"memory, and max_kv_bytes is {format_bytes(self.limit)}: raise it"
            )
        return need

    def admit(self, new: Need, active: Iterable[Any], held: int) -> int | None:
        """Return the bytes that the batch takes at most with another request; None if the request has to wait.

        Args:
            new: the need of the other request.
            active: the batch's requests, each with its `need`, and with its `report` once its prompt is compressed.
            held: bytes of their caches now.
        """
        active = [request for request in active if request.need is not None]
        beyond_held = sum(r.need.reading if r.report is None else r.need.stays for r in active)
        planned = self._held_together([*(r.need for r in active), new])
        taken = max(held + new.most, planned + beyond_held + new.reading)
        return None if active and taken > self.limit else taken

    def _held_together(self, needs: list[Need]) -> int:
        """Return the bytes of the caches of requests that decode together.

        The requests of a group share arrays, and each takes as many rows as the longest. Without a policy, all requests
        are one group of mlx-lm. Otherwise the requests of a group differ by at most a factor of 2, and by a factor of 4
        if their buffers grow, with the buffers' spare room.
        """
        total = 0
        for fixed, factor in ((True, 2), (False, 4)):
            max_padding = math.inf if self._footprint.config.setting is None else factor
            group = [need.held for need in needs if need.fixed == fixed]
            total += sum(int(min(max_padding * held, max(group))) for held in group)
        return total
