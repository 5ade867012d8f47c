"""Sparse attention: all entries stay, and the prompt's chunks and the answer's tokens read few of them."""

from typing import Any, final

import mlx.core as mx

from ..caches.adapter import full_cache
from ..caches.layers import (
    AttentionLayer,
    choosing_layers,
    copies_sharing_entries,
    file_bytes,
    kv_bytes,
    kv_dtype,
)
from ..entries.attention import nan_scores
from ..entries.quantization import KEYS, rows
from ..entries.queries import Queries
from ..planning.request_plan import Plan
from ..planning.speed_record import Speed, speed_of
from ..sparse.cache import SparseKVCache
from ..sparse.full_view import FullView
from ..sparse.kernels.token import why_plain
from ..sparse.options import CHUNK_SIZE
from ..sparse.token_ranking import TokenRanking
from .loop_model import Evaluation
from .pieces import Pieces
from .reading_pace import ReadingPace
from .report import CompressionReport


@final
class SparseMode:
    """Reads a prompt with sparse attention (in full with read="dense"), and lets the answer's tokens choose entries.

    Args:
        model: the mlx-lm model.
        plan: the request's plan.
        layers: the model's full-attention layers.
        prompt_cache: the caches that hold all entries.
        pieces: calls the model for a chunk in pieces whose scores fit in memory.

    Attributes:
        pace: decides which chunks choose; None if no chunk may choose.
    """

    def __init__(
        self,
        model: Any,
        plan: Plan,
        layers: list[AttentionLayer],
        prompt_cache: list,
        pieces: Pieces,
    ):
        """Decide how chunks are paced; nothing is read yet."""
        assert plan.sparse is not None
        self.plan = plan
        self.layers = layers
        self._sparse = plan.sparse
        self._prompt_cache = prompt_cache
        self._pieces = pieces
        self._choosing = choosing_layers(layers)
        self._evaluate = Evaluation()
        self.pace: ReadingPace | None = None
        if plan.sparse_reading is not None:
            is_turn = plan.adapts and plan.n_held > 0
            self.pace = ReadingPace(plan, speed_of(model, plan.sparse) if is_turn else Speed())

    def read(self, inputs: mx.array, cache: list) -> mx.array:
        """Call the model for a chunk `(1, L)`: in one piece if it reads everything, in pieces while it chooses.

        A piece ends when the loop has evaluated it: at the next call.
        """
        if self.pace is None:
            return self._pieces(inputs, cache)
        first = self._choosing[0].cache_in(cache)
        while True:
            self.pace.end()
            n = inputs.shape[1]
            if first.reads_some:
                n = self._piece_size(first.offset, n)
            self.pace.begin(first.offset, n, first.reads_some)
            logits = self._pieces(inputs[:, :n], cache)
            if n == inputs.shape[1]:
                return logits
            self._evaluate(cache)
            inputs = inputs[:, n:]

    def _piece_size(self, start: int, n: int) -> int:
        """Return how many of `n` tokens from a position on choose together; the prompt's last tokens read more."""
        assert self.plan.sparse_reading is not None
        n_before_last = self.plan.sparse_reading.last_from - start
        return min(n, CHUNK_SIZE, n_before_last) if n_before_last > 0 else n

    def compress(self, caches: list, report: CompressionReport) -> None:
        """Replace `caches` by those whose tokens choose among all entries; nothing is evicted."""
        self._require_numbers()
        if report.read_per_token is None:
            self._note_chunks(caches, report)
        caches[:] = copies_sharing_entries(caches, self.layers)
        offload(self.layers, self._prompt_cache)
        report.entries_kept = [None] * len(caches)
        report.attention_share = [None] * len(caches)
        for layer in self.layers:
            # Other layers get the entries of a lending layer as arrays, so every token reads them all.
            if layer.borrowers:
                stored = layer.cache_in(self._prompt_cache)
                layer.put(caches, full_cache(stored.stored_entries().packed(None)))
        for layer in self._choosing:
            cache = SparseKVCache(self._make_ranking(layer))
            layer.put(caches, cache)
            report.entries_kept[layer.index] = cache.n_entries - cache.n_means
            report.means = max(report.means, cache.n_means)
        report.read_per_token = max(filter(None, report.entries_kept))
        first = self._choosing[0]
        stored = first.cache_in(self._prompt_cache)
        if stored.n_queries:
            report.plain_path = why_plain(first.cache_in(caches).ranking, stored.queries[:, :, :1])

    def read_all(self, caches: list) -> None:
        """Replace `caches` by the prompt's own caches, extended by the answer's entries so far.

        The next tokens read all entries, until `compress` is called again.
        """
        mx.eval([c.state for c in caches])  # the next write would copy an array with other readers
        for layer in self.layers:
            answer = layer.cache_in(caches)
            stored = layer.cache_in(self._prompt_cache)
            first = stored.offset
            if layer.borrowers:
                stored.extend(*rows((answer.keys, answer.values), first, answer.offset))
            else:
                stored.extend(*answer.answer)
            layer.put(caches, stored)
        self._prompt_cache[:] = caches

    def end(self, read_caches: list, report: CompressionReport) -> None:
        """Store all entries of a prompt, and perhaps of an answer that read all entries, and describe them.

        Args:
            read_caches: the caches that the prompt was read on.
            report: the report to note the entries in.
        """
        caches = self._prompt_cache
        offload(self.layers, caches)
        self._note_chunks(read_caches, report)
        report.entries_kept = [None] * len(caches)
        for layer in self.layers:
            report.entries_kept[layer.index] = layer.cache_in(caches).n_entries
            report.kv_bytes_before += layer.cache_in(caches).full_nbytes
        report.kv_dtype = kv_dtype(self.layers[0].cache_in(caches))
        report.kv_bytes_after = kv_bytes(caches)
        report.file_bytes = file_bytes(caches)

    def _require_numbers(self) -> None:
        """Raise SnapKVError if attention has produced NaN, by which nothing can be ranked."""
        last = self.layers[-1].cache_in(self._prompt_cache)
        if not last.n_queries:
            return
        view = last.views()[-1]
        newest_key = view.read(KEYS, view.n_entries - 1, view.n_entries)
        if (mx.isnan(last.queries).any() | mx.isnan(newest_key).any()).item():
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

    def _make_ranking(self, layer: AttentionLayer) -> TokenRanking:
        """Return the ranking by which the answer's tokens choose among a layer's entries.

        The layer's cache keeps the index and the clusters of whole blocks for later turns.
        """
        cache = layer.cache_in(self._prompt_cache)
        view = self.full_view(layer)
        ranking = TokenRanking(view, self.plan.decode_quota)
        if self._sparse.residual is not None and cache.n_queries:
            ranking.weigh_residual(self._voters(layer, view), cache.clusters)
        if ranking.residual is not None:
            cache.clusters = ranking.residual.clusters.whole_blocks()
            mx.eval(ranking.residual)  # so that only one layer takes memory for this
        return ranking

    def _voters(self, layer: AttentionLayer, view: FullView) -> Queries:
        """Return the prompt's last queries as voters over all of a layer's entries."""
        cache = layer.cache_in(self._prompt_cache)
        return cache.voters(cache.queries, cache.query_positions, view.blocks().shape)

    def _note_chunks(self, read_caches: list, report: CompressionReport) -> None:
        """Note in the report how many earlier entries a chunk read at most, if chunks chose."""
        if self.plan.sparse_reading is not None:
            report.read_per_chunk = self._choosing[0].cache_in(read_caches).n_read


def offload(layers: list[AttentionLayer], prompt_cache: list) -> None:
    """Move the entries of a prompt to their store.

    Raises: SnapKVError: the disk is full; some entries stay in memory.
    """
    for layer in layers:
        layer.cache_in(prompt_cache).offload()
