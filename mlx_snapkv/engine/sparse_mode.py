"""Prefill and decoding caches for requests with sparse attention."""

import math
from typing import final

import mlx.core as mx

from ..caches.adapter import full_cache
from ..caches.layers import (
    AttentionLayer,
    copies_sharing_entries,
    file_bytes,
    kv_bytes,
    kv_dtype,
    sparse_layers,
)
from ..entries.attention import nan_scores_error
from ..entries.quantization import KEYS, slice_rows
from ..planning.request_plan import Plan
from ..sparse.cache import SparseKVCache
from ..sparse.full_view import FullView
from ..sparse.kernels.token import why_plain_path
from ..sparse.page_means import PageMeans
from ..sparse.page_ranking import PageRanking
from ..sparse.prefill_cache import SparsePrefillKVCache
from ..sparse.token_ranking import TokenRanking
from .pieces import Pieces
from .report import CompressionReport


@final
class SparseMode:
    """Reads the prompt of a sparse request, and switches its answer between sparse and full attention.

    Args:
        plan: the request's plan.
        layers: the model's full-attention layers.
        prompt_cache: the caches that store all entries.
        pieces: calls the model, and splits chunks whose scores would not fit in memory.
    """

    def __init__(
        self,
        plan: Plan,
        layers: list[AttentionLayer],
        prompt_cache: list,
        pieces: Pieces,
    ):
        """Store the arguments."""
        assert plan.sparse is not None
        self.plan = plan
        self.layers = layers
        self._sparse = plan.sparse
        self._prompt_cache = prompt_cache
        self._call_in_pieces = pieces
        self._choosing_layers = sparse_layers(layers)

    def prefill_caches(self) -> list:
        """Create the caches that mlx-lm's loop reads a prompt into.

        With sparse prefill, chunks choose from the stored entries.
        """
        plan = self.plan
        caches = list(self._prompt_cache)
        for layer in self.layers:
            stored_cache = layer.cache_in(self._prompt_cache)
            stored_cache.observe(plan.voters.start, plan.voters.stop, plan.capacity)
            stored_cache.layer = layer
        reading = plan.sparse_reading
        if reading is None:
            return caches
        # If the answer adapts, its first tokens read all entries.
        choice_stop = plan.n_prompt if plan.adapts else math.inf
        for layer in self._choosing_layers:
            stored_cache = layer.cache_in(self._prompt_cache)
            view = FullView([stored_cache.store], layer)
            # Computing page means reads all keys. That is slow if the keys are in files, so in that case, keep the
            # means for later turns.
            means = stored_cache.page_means if stored_cache.in_files else PageMeans()
            ranking = PageRanking(
                view, means, reading.reach, reading.last_reach, reading.last_from, choice_stop
            )
            layer.put(caches, SparsePrefillKVCache(stored_cache, ranking))
        return caches

    def read(self, inputs: mx.array, cache: list) -> mx.array:
        """Call the model on a chunk `(1, L)`, and return the logits of its last piece; see `Pieces`.

        With dense prefill, earlier chunks' entries are first moved to the store, so that at most one chunk's entries
        are kept outside it. With sparse prefill, a chunk that chooses entries and contains the start of the prompt's
        last tokens is split there, because the last tokens choose more entries.
        """
        reading = self.plan.sparse_reading
        if reading is None:
            self._offload()
            return self._call_in_pieces(inputs, cache)
        first_cache = self._choosing_layers[0].cache_in(cache)
        n_before_last = reading.last_from - first_cache.offset
        if first_cache.reads_some and 0 < n_before_last < inputs.shape[1]:
            self._call_in_pieces(inputs[:, :n_before_last], cache)
            mx.eval([layer_cache.state for layer_cache in cache])
            inputs = inputs[:, n_before_last:]
        return self._call_in_pieces(inputs, cache)

    def compress(self, caches: list, report: CompressionReport) -> None:
        """Replace `caches` with caches that let tokens choose among all entries, and fill in the report.

        Raises: SnapKVError: queries or keys contain NaN, or the disk is full.
        """
        self._require_no_nan()
        is_first_compression = report.read_per_token is None
        if is_first_compression:
            self._note_read_per_chunk(caches, report)
        caches[:] = copies_sharing_entries(caches, self.layers)
        self._offload()
        report.entries_kept = [None] * len(caches)
        report.attention_share = [None] * len(caches)
        for layer in self.layers:
            # If other layers receive this layer's entries as arrays, this layer's cache must return all of them; see
            # `sparse_layers`.
            if layer.borrowers:
                stored_cache = layer.cache_in(self._prompt_cache)
                layer.put(caches, full_cache(stored_cache.stored_entries().with_quantization(None)))
        for layer in self._choosing_layers:
            ranking = self._make_ranking(layer)
            cache = SparseKVCache(ranking)
            layer.put(caches, cache)
            report.entries_kept[layer.index] = cache.n_entries - ranking.n_means
            report.means = max(report.means, ranking.n_means)
        report.read_per_token = max(filter(None, report.entries_kept))
        self._note_plain_path(caches, report)

    def _note_plain_path(self, caches: list, report: CompressionReport) -> None:
        """If tokens use plain MLX operations instead of GPU kernels, record why.

        Only the first layer is checked.
        """
        first_layer = self._choosing_layers[0]
        stored_cache = first_layer.cache_in(self._prompt_cache)
        if stored_cache.n_queries:
            one_query = stored_cache.queries[:, :, :1]
            ranking = first_layer.cache_in(caches).ranking
            report.plain_path = why_plain_path(ranking, one_query)

    def use_full_attention(self, caches: list) -> None:
        """Append the entries computed with sparse attention to the full caches, and put the full caches into `caches`.

        From then on, tokens read all entries until `compress` is called again.
        """
        # Evaluate pending reads of the buffers first, or the next write will have to copy the buffers.
        mx.eval([cache.state for cache in caches])
        for layer in self.layers:
            answer_cache = layer.cache_in(caches)
            stored_cache = layer.cache_in(self._prompt_cache)
            if layer.borrowers:  # `answer_cache` is a full cache
                all_entries = answer_cache.keys, answer_cache.values
                stored_cache.append_sparsely_computed(
                    *slice_rows(all_entries, stored_cache.offset, answer_cache.offset)
                )
            else:
                stored_cache.append_sparsely_computed(
                    *answer_cache.ranking.answer.keys_and_values()
                )
            layer.put(caches, stored_cache)
        self._prompt_cache[:] = caches

    def finish(self, prefill_caches: list, report: CompressionReport) -> None:
        """Move all entries to the store, and fill in the report for an answer that read all entries.

        Args:
            prefill_caches: the caches that the prompt was read into.
            report: the report to fill in.
        """
        stored_caches = self._prompt_cache
        self._offload()
        self._note_read_per_chunk(prefill_caches, report)
        report.entries_kept = [None] * len(stored_caches)
        for layer in self.layers:
            stored_cache = layer.cache_in(stored_caches)
            report.entries_kept[layer.index] = stored_cache.n_entries
            report.kv_bytes_before += stored_cache.full_nbytes
        report.kv_dtype = kv_dtype(self.layers[0].cache_in(stored_caches))
        report.kv_bytes_after = kv_bytes(stored_caches)
        report.file_bytes = file_bytes(stored_caches)

    def _require_no_nan(self) -> None:
        """Check that the last layer's queries and newest key contain no NaN, which can't be ranked.

        Raises: SnapKVError.
        """
        last_cache = self.layers[-1].cache_in(self._prompt_cache)
        if not last_cache.n_queries:
            return
        newest_store = last_cache.nonempty_stores()[-1]
        newest_key = newest_store.read(KEYS, newest_store.n_entries - 1, newest_store.n_entries)
        has_nan = mx.isnan(last_cache.queries).any() | mx.isnan(newest_key).any()
        if has_nan.item():
            raise nan_scores_error()

    def full_view(self, layer: AttentionLayer) -> FullView:
        """Return a view of all of a layer's entries, after indexing the new ones.

        If there is no index from earlier turns, or the text has outgrown that index, a new index is fitted to the
        prompt's last queries. A short text has no index.
        """
        cache = layer.cache_in(self._prompt_cache)
        view = FullView([cache.store], layer)
        queries = cache.queries if cache.n_queries else None
        view.index = cache.index = view.extend_index(cache.index, queries)
        return view

    def _make_ranking(self, layer: AttentionLayer) -> TokenRanking:
        """Create the ranking that answer tokens use to choose among a layer's entries.

        The index and the clusters of complete blocks are kept in the layer's cache for later turns.
        """
        cache = layer.cache_in(self._prompt_cache)
        view = self.full_view(layer)
        ranking = TokenRanking(view, self.plan.decode_quota)
        voters = cache.recorded_voters(view.key_reader().shape)
        if self._sparse.residual is not None and voters is not None:
            ranking.fit_residual(voters, cache.clusters)
        if ranking.residual is not None:
            cache.clusters = ranking.residual.clusters.complete_blocks()
            mx.eval(ranking.residual)  # one layer at a time, to limit memory
        return ranking

    def _note_read_per_chunk(self, prefill_caches: list, report: CompressionReport) -> None:
        """Record the largest number of earlier entries that a sparse prompt chunk read."""
        if self.plan.sparse_reading is not None:
            report.read_per_chunk = self._choosing_layers[0].cache_in(prefill_caches).n_read

    def _offload(self) -> None:
        """Move the prompt's entries to their store.

        Raises: SnapKVError: the disk is full. Some entries then stay in memory.
        """
        for layer in self.layers:
            layer.cache_in(self._prompt_cache).offload()
