"""Sparse attention: all entries stay, and the prompt's chunks and the answer's tokens read few of them."""

import mlx.core as mx

from ..caches.full_view import FullView
from ..caches.layers import (
    AttentionLayer,
    copies_but_entries,
    file_bytes,
    kv_bytes,
    kv_dtype,
)
from ..caches.page_ranking import PageRanking
from ..caches.sparse import SparseKVCache
from ..caches.sparse_prefill import SparsePrefillKVCache
from ..entries import device
from ..entries.queries import Queries
from ..models.patch import recording
from ..policies.budgets import Quota
from .compress import Choice
from .report import Verified
from .retaining import RetainingReader
from .self_speculation import SelfSpeculation

SHARED, PAGES = 128, 4  # entries of a page that all heads read, and how many such pages
AGAIN = 64  # of the prompt's latest tokens, which beyond the trained length are read again, as the answer's are
TOGETHER = 8  # of those, which choose together


class SparseReader(RetainingReader):
    """Reads on caches that choose for each chunk, or, with read="dense", on the caller's own; the answer chooses.

    Beyond the trained length the question's tokens, too, have to read what they ask for where every head finds it: the
    prompt's latest tokens are read a second time, on the answer's caches, before its last one is.
    """

    # Caches without the latest tokens' part, but for entries, and those tokens `(1, n)` each.
    _before_latest: list | None = None
    _latest: list[mx.array]

    def _prepare(self) -> None:
        super()._prepare()
        self._latest = []
        reading = self.plan.sparse_reading
        if reading is None:
            return
        self._last_from, self._again_from = reading.last_from, self.plan.n_prompt - AGAIN
        reads = reading.reach, reading.last, reading.last_from, reading.near
        for layer in self.layers:
            everything = layer.cache_in(self.prompt_cache)
            view = FullView([everything.store], layer, self.plan.compaction)
            ranking = PageRanking(view, *reads)
            layer.put(self.caches, SparsePrefillKVCache(everything, ranking))
        self.hook = self._read

    @property
    def read_caches(self) -> list:
        return self.prompt_cache

    def _read(self, inputs: mx.array, cache: list) -> mx.array:
        """The model's call for tokens `(1, L)` of the prompt.

        The last ones read more, in a call of their own, and the very last is read on the answer's caches where the
        latest are.
        """
        first = self.layers[0].cache_in(cache)
        n = self._last_from - first.offset
        if 0 < n < inputs.shape[1] and first.reads_some:
            self._pieces(inputs[:, :n], cache)
            mx.eval([c.state for c in cache])
            inputs = inputs[:, n:]
        if self.plan.compacted_to is None:
            return self._pieces(inputs, cache)
        if self.answers and first.offset == self.plan.n_prompt - 1:
            self.compress()
            cache[:] = self.caches
            return self._model(inputs, cache=cache)
        return self._read_latest(inputs, cache)

    def _read_latest(self, inputs: mx.array, cache: list) -> mx.array:
        """The same, with those noted that are to be read again."""
        n = max(0, self._again_from - self.layers[0].cache_in(cache).offset)
        if n >= inputs.shape[1]:
            return self._pieces(inputs, cache)
        if n:
            self._pieces(inputs[:, :n], cache)
            mx.eval([c.state for c in cache])
        if self._before_latest is None:
            self._before_latest = copies_but_entries(cache, self.layers)
        self._latest.append(inputs[:, n:])
        return self._pieces(inputs[:, n:], cache)

    def choose(self) -> list[Choice]:
        """Nothing: the answer's tokens choose."""
        return []

    def prompt_is_read(self) -> None:
        super().prompt_is_read()
        if self.plan.sparse_reading is not None and not self.is_compressed:
            self.report.read_per_chunk = self.layers[0].cache_in(self.caches).n_read

    def leave_entries(self) -> None:
        """Store all entries for requests to come; the report says where they are."""
        self.offload()
        self.prompt_is_read()
        self.hook = None
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
        """Caches whose tokens choose anew among all entries, instead of choices."""
        self.caches[:] = copies_but_entries(self._before_latest or self.caches, self.layers)
        self.offload()
        report = self.report
        shared = None if self.plan.compacted_to is None else self._most_attended()
        latest = mx.concatenate(self._latest, axis=1) if self._latest else mx.zeros((1, 0))
        for layer, quota in zip(self.layers, self.plan.decode_quotas):
            cache = self._choosing(layer, quota, shared, latest.shape[1])
            layer.put(self.caches, cache)
            report.entries_kept[layer.index] = cache.n_entries - cache.n_means
            report.means = max(report.means, cache.n_means)
        report.read_per_token = max(filter(None, report.entries_kept))
        with recording(self._observed):
            for start in range(0, latest.shape[1], TOGETHER):
                mx.eval(self._model(latest[:, start : start + TOGETHER], cache=self.caches))
        self._before_latest, self._latest = None, []

    def begin_answer(self) -> None:
        super().begin_answer()
        self.observes = True
        if self.config.verify is not None:
            self.report.verified = Verified()
            caches = self._full_caches(), list(self.caches)
            self.hook = SelfSpeculation(self._model, *caches, self.report.verified, self._pieces)

    def _count_staying(self) -> None:
        """What an answer reads includes the index by which it chooses."""
        super()._count_staying()
        kept = [layer.cache_in(self.prompt_cache) for layer in self.layers]
        self.report.kv_bytes_staying -= sum(cache.index_nbytes for cache in kept)

    def _choosing(
        self, layer: AttentionLayer, quota: Quota, shared: mx.array | None, n_latest: int
    ) -> SparseKVCache:
        """A cache whose tokens choose `quota` entries anew among all before the latest, beside those `shared` by all
        heads."""
        view, cache = self.full_view(layer), layer.cache_in(self.prompt_cache)
        if n_latest:
            view = view.beginning(len(view) - n_latest)
        # All layers or none: mlx-lm makes one mask for them.
        weighs = self.plan.weighs_rest and all(map(SparseKVCache.can_weigh, self.layers))
        voters = self._voters(layer, view) if weighs and cache.n_queries else None
        return SparseKVCache(view, quota, layer, shared, observed=voters)

    def _most_attended(self) -> mx.array | None:
        """Positions of the pages that get the largest share of any head's attention by the prompt's last queries.

        Some heads point at what a question asks for (Wu et al., 2024, arXiv:2404.15574). The others need to read it
        there, too, and beyond the trained length they don't find it by themselves. None if there are too few pages.
        """
        quota, page = self.plan.decode_quotas[0], mx.arange(SHARED)
        n_pages = min(PAGES, (quota.entries - quota.n_sink - quota.n_window) // 2 // SHARED)
        first = -(-quota.n_sink // SHARED)
        last = (self.plan.n_prompt - quota.n_window) // SHARED
        if n_pages < 1 or (last - first) * SHARED <= quota.entries:
            return None
        most = mx.zeros(last - first)
        for layer in self.layers:
            view = self.full_view(layer)
            entries = view.voted_by(self._voters(layer, view))
            entries.budget = max(quota.entries, device.used.exact_votes)
            votes = mx.unflatten(
                entries.votes[..., first * SHARED : last * SHARED], -1, (-1, SHARED)
            )
            pages = votes.sum(axis=-1)
            shares = pages / mx.maximum(pages.sum(axis=-1, keepdims=True), 1e-9)
            most = mx.maximum(most, layer.heads.max(shares.max(axis=(0, 1))))
            mx.eval(most)
        best = mx.sort(mx.argpartition(-most, n_pages - 1)[:n_pages]) + first
        return (best[:, None] * SHARED + page).flatten().astype(mx.uint32)

    def _voters(self, layer: AttentionLayer, view: FullView) -> Queries:
        """The prompt's last queries, as they vote over all of a layer's entries."""
        cache = layer.cache_in(self.prompt_cache)
        return cache.voters(cache.queries, cache.query_positions, view.blocks().shape)

    def _full_caches(self) -> list:
        full = list(self.prompt_cache)
        for layer in self.layers:
            layer.put(full, layer.cache_in(full).growing_cache())
        return full

    def end(self) -> None:
        if isinstance(self.hook, SelfSpeculation):
            self.hook.close()
