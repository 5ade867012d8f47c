"""Later turns of a conversation: reading on where a prompt cache already holds tokens."""

from __future__ import annotations

import copy
import time

import mlx.core as mx

from ..caches.layers import AttentionLayer, attention_layers
from ..caches.offloaded import RestingKVCache
from ..entries.entries import Entries
from ..entries.quantization import Quantization
from ..policies import Policy, Stages
from ..policies.budgets import Quota
from .compress import compress_prompt_cache, rows_held
from .report import CompressionReport
from .request import RecordedRequest, last_voter


class _LaterTurn(RecordedRequest):
    """A request on caches that hold tokens already.

    Args:
        n_new: tokens of the turn.
        prompt_cache: a model's caches, all holding the same tokens.
        lookahead: answer tokens that vote too.
        quantization: how the rows that the answer is decoded from are to be quantised, if at all.
    """

    def __init__(
        self,
        model,
        policy: Policy | Stages,
        n_new: int,
        prompt_cache: list,
        lookahead: int,
        quantization: Quantization | None = None,
    ):
        self._held = held_tokens(model, prompt_cache)
        n_prompt = self._held + n_new
        last = last_voter(policy, n_prompt, lookahead)
        super().__init__(model, policy, n_prompt, prompt_cache, last, quantization)

    def _require_fresh(self) -> None:
        """The rows of earlier turns are what this is about."""


class Turn(_LaterTurn):
    """One more turn on a cache that holds tokens already: its queries vote over the rows held and its own.

    What was dropped before is gone. The caller's list is not touched before the cut, and neither are its caches: if
    anything raises on the way, they are as they were. They may be full or compressed.
    """

    @property
    def _in_blocks(self) -> bool:
        return True

    def _reading_caches(self, quotas: list[Quota]) -> list:
        caches = _copies_but_rows(self._callers, self._layers)
        for layer, quota in zip(self._layers, quotas):
            cache = layer.cache_in(self._callers)
            held = None if cache.empty() else rows_held(cache)
            if self.reading.schedule == "once":
                new = max(self.n_prompt, self._last) + 1 - self._held
                quota = Quota(cache.size() + new, quota.n_sink, quota.n_window)
            block = self._block_cache(layer, quota, self._quantization_for(held))
            if held is not None:
                block.offset = cache.offset
                block.hold(held)
            layer.put(caches, block)
        return caches

    def _quantization_for(self, held: Entries | None) -> Quantization | None:
        """How the rows are stored while the turn is read: plain if the cut is to quantise them: none is twice."""
        plain = held is None or held.quantization is None
        return None if plain and self.reading.schedule == "once" else self._quantization


class RecalledTurn(_LaterTurn):
    """One more turn on full caches that stay: its queries vote over all rows ever read.

    The caller's caches go on holding all rows, in `RecordingKVCache`s or `RestingKVCache`s, this turn's among them. The
    compressed ones, in `caches` after the cut, serve its answer only.
    """

    @property
    def _in_blocks(self) -> bool:
        return False

    def _reading_caches(self, quotas: list[Quota]) -> list:
        for layer in self._layers:
            capacity = max(self.n_prompt, self._last) + 1
            layer.cache_in(self._callers).observe(self._first, self._last, capacity)
        return list(self._callers)

    def cut(self) -> CompressionReport:
        """Put compressed caches into `caches`, and the turn's rows to rest.

        Raises:
            SnapKVError: there is no room for them where they are to rest; some then stay in memory.
        """
        self.prompt_is_read()
        started = time.perf_counter()
        small = _copies_but_rows(self._callers, self._layers)
        report = compress_prompt_cache(
            self.model, small, self.answering, quantization=self._quantization
        )
        report.policy, report.prompt_tokens = str(self.policy), self.n_prompt
        report.prefill_seconds = self._prefill_seconds or 0.0
        self.caches[:] = small
        if report.compressed:
            for layer in self._layers:
                cache = layer.cache_in(self._callers)
                if isinstance(cache, RestingKVCache):
                    cache.rest()
            mx.clear_cache()
        self.cut_seconds = time.perf_counter() - started
        return report


def held_tokens(model, prompt_cache: list) -> int:
    """Tokens that a prompt cache has read."""
    return attention_layers(model, prompt_cache)[0].cache_in(prompt_cache).offset


def _copies_but_rows(prompt_cache: list, layers: list[AttentionLayer]) -> list:
    """The same list with copies of all caches but those of the full-attention layers."""
    rows = [layer.cache_in(prompt_cache) for layer in layers]
    memo = {id(cache): cache for cache in rows}
    return [copy.deepcopy(c, memo) for c in prompt_cache]
