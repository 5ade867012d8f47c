"""Admission control for batches: decides whether there is enough KV memory for another request."""

import math
import sys
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

from ..completions.request import CompletionRequest
from ..errors import SnapKVError
from ..models.distributed import from_first_rank
from ..planning.config import CompressionConfig
from ..planning.entry_sizes import EntrySizes
from ..planning.footprint import Footprint, Need
from ..planning.kv_limit import NO_KV_LIMIT, advice_to_fit, machine_kv_limit, request_fits
from ..planning.prompt_plan import PREFILL_STEP_SIZE
from ..planning.units import format_bytes

# Memory is always reserved for at least this many answer tokens, unless a request asks for fewer.
RESERVED_ANSWER = 2048


class NeverFits(SnapKVError):
    """A request needs more memory than the limit allows, even on its own."""


class Memory:
    """Estimates the KV memory of a batch, and decides which requests fit.

    Args:
        sizes: the model's entry sizes.
        options: keyword arguments for `CompressedBatchGenerator`.
        limit: KV memory limit in bytes, or `NO_KV_LIMIT`. None means the memory that the model leaves free on this
            machine.
    """

    def __init__(self, sizes: EntrySizes, options: dict[str, Any], limit: int | None):
        """Take the config and the chunk size from `options`, and determine the limit."""
        config, _ = CompressionConfig.from_keywords(options)
        step_size = options.get("prefill_step_size", PREFILL_STEP_SIZE)
        self._footprint = Footprint(sizes, config, step_size)
        self._is_limit_of_user = limit is not None
        if limit is None:
            limit = from_first_rank(partial(machine_kv_limit, self._footprint))
        elif limit == NO_KV_LIMIT:
            limit = sys.maxsize
        self.limit = limit

    def need(self, n_prompt: int, max_tokens: int) -> Need:
        """Estimate the memory that a request needs.

        Raises:
            NeverFits: the request needs more than the limit.
            SnapKVError: the policy does not support the request.
        """
        plan = self._footprint.plan(n_prompt, max_tokens)
        need = self._footprint.need(plan, max_tokens)
        if need.peak_entry_bytes <= self.limit:
            return need
        limit_text = f"this machine has {format_bytes(self.limit)}"
        if self._is_limit_of_user:
            limit_text = f"max_kv_bytes is {format_bytes(self.limit)}: raise it"
        what_fits = advice_to_fit(self._footprint, n_prompt, max_tokens, self.limit)
        raise NeverFits(
            f"its {n_prompt} prompt tokens and {max_tokens} of the answer need "
            f"{format_bytes(need.peak_entry_bytes)} of KV memory, and {limit_text}; {what_fits}"
        )

    def limit_answer(self, request: CompletionRequest) -> CompletionRequest:
        """Limit a request's answer to what fits in memory; see `longest_answer`.

        Constrained answers keep their `max_tokens`, because their JSON or tool call has to be complete.
        """
        if request.constraint is not None:
            return request
        n_answer = self.longest_answer(len(request.prompt), request.max_tokens)
        return replace(request, max_tokens=n_answer)

    def longest_answer(self, n_prompt: int, max_tokens: int) -> int:
        """Return how many answer tokens to reserve memory for: `max_tokens`, or fewer if memory is short.

        Clients often allow much longer answers than they get, so a request is not rejected just because its longest
        possible answer would not fit. The result is at least `RESERVED_ANSWER`, unless `max_tokens` is smaller. If the
        user has set a limit, the result is always `max_tokens`.
        """
        if self._is_limit_of_user:
            return max_tokens
        n_answer = max_tokens
        while n_answer > RESERVED_ANSWER:
            if request_fits(self._footprint, n_prompt, n_answer, self.limit):
                break
            n_answer = max(RESERVED_ANSWER, n_answer // 2)
        return n_answer

    def admit(self, need: Need, active: Collection[Any], cache_bytes: int) -> int | None:
        """Return the batch's peak memory with the new request, or None if that request has to wait.

        The peak is the larger of two estimates:

        - the size of all caches now, plus the peak of the new request
        - the size of all caches at the end of all answers, plus the extra memory that each request needs in its current
          phase, prefill or answer

        An empty batch admits any request.

        Args:
            need: memory that the new request needs.
            active: the requests in the batch. Each has a `need` and, once its prompt is compressed, a `report`.
            cache_bytes: current size of the batch's caches.
        """
        extra_bytes = need.extra_in_prefill
        for request in active:
            if request.report is None:  # its prompt is being read
                extra_bytes += request.need.extra_in_prefill
            else:
                extra_bytes += request.need.extra_in_answer
        needs = [*(request.need for request in active), need]
        cache_bytes_at_end = self._cache_bytes_at_end(needs)
        peak_bytes = max(cache_bytes + need.peak_entry_bytes, cache_bytes_at_end + extra_bytes)
        has_to_wait = bool(active) and peak_bytes > self.limit
        return None if has_to_wait else peak_bytes

    def _cache_bytes_at_end(self, needs: list[Need]) -> int:
        """Return an upper bound on the total size of the caches at the end of all answers, including padding.

        If requests share arrays, each takes as much memory as the longest one. Without a policy or sparse attention,
        requests of any length can share mlx-lm's arrays. With a policy, only requests of similar size share arrays, so
        padding at most doubles a request's size. If the buffers grow, they also have unused rows, and a request takes
        at most 4 times its own size.
        """
        has_policy = self._footprint.config.setting is not None
        total_bytes = 0
        for keeps_shape, padding_factor in ((True, 2), (False, 4)):
            max_factor = padding_factor if has_policy else math.inf
            sizes = [need.cache_bytes_at_end for need in needs if need.keeps_shape == keeps_shape]
            longest = max(sizes, default=0)
            total_bytes += sum(int(min(max_factor * size, longest)) for size in sizes)
        return total_bytes
