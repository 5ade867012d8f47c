"""Decide whether a batch has KV memory for another request, before the request's prompt is read."""

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

from ..errors import SnapKVError
from ..models.distributed import from_first
from ..planning.config import CompressionConfig
from ..planning.entry_sizes import EntrySizes
from ..planning.footprint import Footprint, Need
from ..planning.kv_limit import advice, fits, machine_kv_limit
from ..planning.prompt_plan import PREFILL_STEP_SIZE
from ..planning.units import format_bytes

# Tokens of an answer for which memory is reserved at least, if a request asks for as many.
RESERVED_ANSWER = 2048


class NeverFits(SnapKVError):
    """A request needs more than the whole limit."""


class Memory:
    """The KV memory of a batch.

    Args:
        sizes: sizes of the model's entries.
        options: the keywords of the batch's `CompressedBatchGenerator`.
        limit: bytes of KV memory; None for what this machine has beside the model.
    """

    def __init__(self, sizes: EntrySizes, options: dict[str, Any], limit: int | None):
        """Read prefill's chunk size and the setting from `options`; the model itself is not needed."""
        config, _ = CompressionConfig.from_keywords(options)
        step_size = options.get("prefill_step_size", PREFILL_STEP_SIZE)
        self._footprint = Footprint(sizes, config, step_size)
        self._is_given = limit is not None
        if limit is None:
            limit = from_first(partial(machine_kv_limit, self._footprint))
        self.limit = limit

    def need(self, n_prompt: int, max_tokens: int) -> Need:
        """Return the memory that a request needs.

        Raises:
            NeverFits: the request needs more than the limit.
            SnapKVError: the policy can't serve it.
        """
        plan = self._footprint.plan(n_prompt, max_tokens)
        need = self._footprint.need(plan, max_tokens)
        if need.most > self.limit:
            limit = format_bytes(self.limit)
            has = (
                f"max_kv_bytes is {limit}: raise it"
                if self._is_given
                else f"this machine has {limit}"
            )
            raise NeverFits(
                f"its {n_prompt} prompt tokens and {max_tokens} of the answer need {format_bytes(need.most)} of KV "
                f"memory, and {has}; {advice(self._footprint, n_prompt, max_tokens, self.limit)}"
            )
        return need

    def longest_answer(self, n_prompt: int, max_tokens: int) -> int:
        """Return how many tokens of an answer to reserve memory for: `max_tokens`, or fewer if this machine has less.

        Clients ask for long answers and rarely get them, so they are not refused for an answer that would not fit. The
        result is at least `RESERVED_ANSWER`, unless `max_tokens` is less. A limit that a user has set holds strictly.
        """
        n = max_tokens
        while n > RESERVED_ANSWER and not self._is_given:
            if fits(self._footprint, n_prompt, n, self.limit):
                break
            n = max(RESERVED_ANSWER, n // 2)
        return n

    def admit(self, new: Need, active: Iterable[Any], held: int) -> int | None:
        """Return the bytes that the batch takes at most with another request; None if the request has to wait.

        The result is the larger of two bounds: the bytes held now plus the whole need of the new request, and the bytes
        that all requests will hold together plus the bytes that each takes in addition. An empty batch admits any
        request.

        Args:
            new: the need of the other request.
            active: the batch's requests, each with its `need`, and with its `report` once its prompt is compressed.
            held: bytes of their caches now.
        """
        others = [request for request in active if request.need is not None]
        beyond_held = new.reading
        for request in others:
            is_reading = request.report is None
            beyond_held += request.need.reading if is_reading else request.need.stays
        planned = self._held_together([*(request.need for request in others), new])
        taken = max(held + new.most, planned + beyond_held)
        has_to_wait = bool(others) and taken > self.limit
        return None if has_to_wait else taken

    def _held_together(self, needs: list[Need]) -> int:
        """Return the bytes of the caches of requests that decode together.

        The requests of a group share arrays, and each takes as many rows as the longest. Without a policy, all requests
        are one group of mlx-lm. Otherwise the requests of a group differ by at most a factor of 2, and by a factor of 4
        if their buffers grow, with the buffers' spare room.
        """
        has_policy = self._footprint.config.setting is not None
        total = 0
        for is_fixed, factor in ((True, 2), (False, 4)):
            max_padding = factor if has_policy else math.inf
            sizes = [need.held for need in needs if need.fixed == is_fixed]
            longest = max(sizes, default=0)
            total += sum(int(min(max_padding * size, longest)) for size in sizes)
        return total
