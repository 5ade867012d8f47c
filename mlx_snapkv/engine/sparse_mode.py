"""Sparse attention: all entries stay, and the prompt's chunks and the answer's tokens read few of them."""

from typing import Any, final

import mlx.core as mx

from ..caches.adapter import full_cache
from ..caches.layers import AttentionLayer, choosing_layers, copies_but_entries
from ..entries.attention import nan_scores
from ..entries.queries import Queries
from ..planning.request_plan import Plan
from ..sparse.cache import SparseKVCache
from ..sparse.full_view import FullView
from ..sparse.token_ranking import TokenRanking
from .pieces import Pieces
from .report import CompressionReport


@final
class SparseMode:
    """How sparse attention reads a prompt (in full with read="dense"), and how the answer's tokens choose entries."""

    def __init__(
        self,
        plan: Plan,
        layers: list[AttentionLayer],
        prompt_cache: list,
        pieces: Pieces,
    ):
        assert plan.sparse is not None
        self.plan, self.layers, self._sparse = plan, layers, plan.sparse
        self._prompt_cache, self._pieces = prompt_cache, pieces
        self._choosing = choosing_layers(layers)

    def read(self, inputs: mx.array, cache: list) -> mx.array:
        """Call the model for a chunk `(1, L)`, and again for the last tokens of the prompt, which read more."""
        reading, first = self.plan.sparse_reading, self._choosing[0].cache_in(cache)
        if reading is not None and first.reads_some:
            n = reading.last_from - first.offset
            if 0 < n < inputs.shape[1]:
                self._pieces(inputs[:, :n], cache)
                mx.eval([c.state for c in cache])
                inputs = inputs[:, n:]
        return self._pieces(inputs, cache)

    def compress(self, caches: list, report: CompressionReport) -> None:
        """Replace `caches` by those whose tokens choose among all entries; nothing is evicted."""
        self._require_numbers()
        note_chunks(self.plan, self._choosing[0].cache_in(caches), report)
        caches[:] = copies_but_entries(caches, self.layers)
        offload(self.layers, self._prompt_cache)
        report.entries_kept, report.attention_share = [None] * len(caches), [None] * len(caches)
        for layer in self.layers:
            if (
                layer.borrowers
            ):  # the other layers get their entries as arrays, so every token reads them all
                stored = layer.cache_in(self._prompt_cache)
                layer.put(caches, full_cache(stored.stored_entries().packed(None)))
        for layer in self._choosing:
            cache = SparseKVCache(self._ranking(layer))
            layer.put(caches, cache)
            report.entries_kept[layer.index] = cache.n_entries - cache.n_means
            report.means = max(report.means, cache.n_means)
        report.read_per_token = max(filter(None, report.entries_kept))

    def _require_numbers(self) -> None:
        """Raise SnapKVError if attention has produced NaN, by which nothing can be ranked."""
        last = self.layers[-1].cache_in(self._prompt_cache)
        if last.n_queries and mx.isnan(last.queries).any().item():
            raise nan_scores()

    def full_view(self, layer: AttentionLayer) -> FullView:
        """Return a view of all of a layer's entries, with the index of earlier turns extended by the new entries.

        A new index is made for queries like the prompt's last ones, if they were recorded.
        """
        cache = layer.cache_in(self._prompt_cache)
        view = FullView([cache.store], layer)
        queries = cache.queries if cache.n_queries else None
        view.index = cache.index = view.grown_index(cache.index, queries)
        return view

    def _ranking(self, layer: AttentionLayer) -> TokenRanking:
        """Return the ranking by which the answer's tokens choose among a layer's entries."""
        cache, view = layer.cache_in(self._prompt_cache), self.full_view(layer)
        ranking = TokenRanking(view, self.plan.decode_quota)
        if self._sparse.residual is not None and cache.n_queries:
            ranking.weigh_residual(self._voters(layer, view), cache.clusters)
        if ranking.residual is not None:
            cache.clusters = ranking.residual.clusters.whole_blocks()
        return ranking

    def _voters(self, layer: AttentionLayer, view: FullView) -> Queries:
        """Return the prompt's last queries as voters over all of a layer's entries."""
        cache = layer.cache_in(self._prompt_cache)
        return cache.voters(cache.queries, cache.query_positions, view.blocks().shape)


def note_chunks(plan: Plan, cache: Any, report: CompressionReport) -> None:
    """Note in the report how many earlier entries a chunk read at most, if chunks chose; `cache` is a layer's."""
    if plan.sparse_reading is not None:
        report.read_per_chunk = cache.n_read


def offload(layers: list[AttentionLayer], prompt_cache: list) -> None:
    """Move the entries of a prompt to their store.

    Raises: SnapKVError: the disk is full; some entries stay in memory.
    """
    for layer in layers:
        layer.cache_in(prompt_cache).offload()
