"""Sparse attention: all entries stay, and the prompt's chunks and the answer's tokens read few of them."""

from typing import Any

import mlx.core as mx

from ..caches.full_view import FullView
from ..caches.layers import (
    AttentionLayer,
    copies_but_entries,
    file_bytes,
    kv_bytes,
    kv_dtype,
)
from ..caches.sparse import SparseKVCache
from ..caches.sparse_prefill import SparsePrefillKVCache
from ..policies.budgets import Quota
from ..policies.sparse import CHUNK, LAST
from .compress import Choice
from .report import Verified
from .retaining import RetainingReader
from .self_speculation import SelfSpeculation


class SparseReader(RetainingReader):
    """Reads on caches that choose for each chunk, or, with read="dense", on the caller's own; the answer chooses."""

    def _prepare(self, quotas: list[Quota]) -> None:
        super()._prepare(quotas)
        if self.sparse.read == "dense":
            return
        n_prompt = self.plan.n_prompt
        self._dense_from = n_prompt - LAST
        reach = self.sparse.reach(n_prompt)
        for layer in self.layers:
            everything = layer.cache_in(self.prompt_cache)
            if everything.growing is not everything.store.cache:  # from where entries soon go to a store
                everything.growing.step = min(everything.growing.step, reach.most + CHUNK)
            view = FullView([everything.store], layer, self.compaction)
            layer.put(self.caches, SparsePrefillKVCache(everything, view, reach, self._dense_from))
        if n_prompt > reach.most and self.n_held < self._dense_from:
            self.report.read_per_chunk = reach.most
        self.observes, self.hook = True, self._read

    @property
    def read_caches(self) -> list:
        return self.prompt_cache

    @property
    def sparse(self) -> Any:
        return self.policy

    def _read(self, inputs: mx.array, cache: list) -> mx.array:
        """The model's call for tokens `(1, L)` of the prompt; the last ones read more, in a call of their own."""
        offset = self.layers[0].cache_in(cache).offset
        n = self._dense_from - offset
        if 0 < n < inputs.shape[1]:
            self._model(inputs[:, :n], cache=cache)
            mx.eval([c.state for c in cache])
            inputs = inputs[:, n:]
        return self._model(inputs, cache=cache)

    def choose(self) -> list[Choice]:
        """Nothing: the answer's tokens choose."""
        return []

    def leave_entries(self) -> None:
        """Store all entries for requests to come; the report says where they are."""
        self.offload()
        self.prompt_is_read()
        caches = [layer.cache_in(self.prompt_cache) for layer in self.layers]
        report = self.report
        report.entries_kept = [None] * len(self.prompt_cache)
        for layer, cache in zip(self.layers, caches):
            report.entries_kept[layer.index] = cache.n_entries
            report.kv_bytes_before += cache.full_nbytes
        report.kv_dtype = kv_dtype(caches[0])
        report.kv_bytes_after = kv_bytes(self.prompt_cache)
        report.file_bytes = file_bytes(self.prompt_cache)

    def keep(self, choices: list[Choice]) -> None:
        self.caches[:] = copies_but_entries(self.caches, self.layers)
        self.offload()

    def begin_answer(self) -> None:
        """Let every token of the answer choose anew among all entries."""
        super().begin_answer()
        report = self.report
        self.observes = True
        for layer, quota in zip(self.layers, self.decode_quotas):
            cache = self._choosing(layer, quota)
            layer.put(self.caches, cache)
            report.entries_kept[layer.index] = cache.n_entries - cache.n_means
            report.means = max(report.means, cache.n_means)
        report.read_per_token = max(filter(None, report.entries_kept))
        self._count_staying()
        if self.config.verify is not None:
            report.verified = Verified()
            caches = self._full_caches(), list(self.caches)
            self.hook = SelfSpeculation(self._model, *caches, report.verified)

    def _count_staying(self) -> None:
        """What an answer reads includes the index by which it chooses."""
        super()._count_staying()
        kept = [layer.cache_in(self.prompt_cache) for layer in self.layers]
        self.report.kv_bytes_staying -= sum(cache.index_nbytes for cache in kept)

    def _choosing(self, layer: AttentionLayer, quota: Quota) -> SparseKVCache:
        """A cache whose tokens choose `quota` entries anew among all."""
        view, cache = self.full_view(layer), layer.cache_in(self.prompt_cache)
        # All layers or none: mlx-lm makes one mask for them.
        weighs = self.sparse.rest is not None and all(map(SparseKVCache.can_weigh, self.layers))
        voters = cache.held(1).voters if weighs and cache.n_queries else None
        return SparseKVCache(view, quota, layer, observed=voters)

    def _full_caches(self) -> list:
        full = list(self.prompt_cache)
        for layer in self.layers:
            layer.put(full, layer.cache_in(full).growing_cache())
        return full

    def end(self) -> None:
        if isinstance(self.hook, SelfSpeculation):
            self.hook.close()
