"""Decide whether a batch has KV memory for another request before its prompt is read."""

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

# Memory is reserved for at least this many answer tokens, if a request asks for them.
RESERVED_ANSWER = 2048


class NeverFits(SnapKVError):
    """A request needs more memory than the whole limit."""


class Memory:
    """The KV memory of a batch.

    Args:
        sizes: sizes of the model's entries.
        options: keywords of the `CompressedBatchGenerator`.
        limit: limit of KV memory in bytes; None for the memory that this machine has in addition to the model.
    """

    def __init__(self, sizes: EntrySizes, options: dict[str, Any], limit: int | None):
        """Read the setting and the chunk size from `options`. The model is not needed."""
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
            SnapKVError: the policy can't be applied to it.
        """
        plan = self._footprint.plan(n_prompt, max_tokens)
        need = self._footprint.need(plan, max_tokens)
        if need.peak_entries > self.limit:
            limit = format_bytes(self.limit)
            has = (
                f"max_kv_bytes is {limit}: raise it"
                if self._is_given
                else f"this machine has {limit}"
            )
            needed = format_bytes(need.peak_entries)
            raise NeverFits(
                f"its {n_prompt} prompt tokens and {max_tokens} of the answer need {needed} of KV "
                f"memory, and {has}; {advice(self._footprint, n_prompt, max_tokens, self.limit)}"
            )
        return need

    def longest_answer(self, n_prompt: int, max_tokens: int) -> int:
        """Return the number of answer tokens for which to reserve memory: `max_tokens`, or fewer if memory is short.

        Clients request long answers and rarely get them, so a request is not rejected because its longest answer would
        not fit. The result is at least `RESERVED_ANSWER`, unless `max_tokens` is smaller. A limit set by a user is not
        exceeded.
        """
        n = max_tokens
        while n > RESERVED_ANSWER and not self._is_given:
            if fits(self._footprint, n_prompt, n, self.limit):
                break
            n = max(RESERVED_ANSWER, n // 2)
        return n

    def admit(self, new: Need, active: Iterable[Any], held_bytes: int) -> int | None:
        """Return the maximum bytes of the batch with another request; None if the request has to wait.

        The result is the larger of two bounds: the bytes used now plus everything that the new request needs; and the
        bytes that all requests will keep plus the bytes that each needs temporarily. An empty batch admits any request.

        Args:
            new: the need of the new request.
            active: the requests of the batch, with their `need`, and their `report` once prompts are compressed.
            held_bytes: bytes of the caches of the batch now.
        """
        others = [request for request in active if request.need is not None]
        temporary = new.extra_in_prefill
        for request in others:
            is_reading = request.report is None
            temporary += (
                request.need.extra_in_prefill if is_reading else request.need.extra_in_answer
            )
        planned = self._shared_bytes([*(request.need for request in others), new])
        needed = max(held_bytes + new.peak_entries, planned + temporary)
        has_to_wait = bool(others) and needed > self.limit
        return None if has_to_wait else needed

    def _shared_bytes(self, needs: list[Need]) -> int:
        """Return the bytes of caches that decode together.

        The requests of a group share arrays, in which each has as many rows as the longest. Without a policy, all
        requests are one group of mlx-lm. Otherwise the requests of a group differ by at most a factor of 2, or of 4 if
        their buffers grow, because buffers have unused rows.
        """
        has_policy = self._footprint.config.setting is not None
        total = 0
        for keeps_shape, factor in ((True, 2), (False, 4)):
            max_padding = factor if has_policy else math.inf
            sizes = [need.caches for need in needs if need.keeps_shape == keeps_shape]
            longest = max(sizes, default=0)
            total += sum(int(min(max_padding * size, longest)) for size in sizes)
        return total
