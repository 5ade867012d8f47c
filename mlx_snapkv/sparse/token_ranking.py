"""Choose the entries that an answer token reads, ranked by an index or by exact attention."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..entries.attention import attention_votes
from ..entries.quantization import concatenate_rows, slice_rows
from ..entries.queries import CapturedQueries, Queries
from ..entries.quota import Quota
from .clusters import Clusters, CompleteBlocks, cluster_entries
from .full_view import FullView
from .residual import FITTING_QUERIES, Example, Residual, best_factors, distances
from .selection import best_positions
from .stores import MemoryStore

Pair = tuple[mx.array, mx.array]  # keys and values `(B, n_kv_heads, n, head_dim)`


class TokenRanking:
    """Selects the entries that each answer token reads, scored by the token's own queries.

    Entries are numbered by position, first the prompt's and then the answer's:

        [0 : n_sink)              the sink, which every token reads
        [n_sink : choice_stop)    entries that a token chooses among; the residual represents the unchosen ones
        [choice_stop : n)         the window and the answer's newest entries, which every token reads

    Args:
        prompt: view of all of the prompt's entries. If it has no index, entries are ranked by exact attention.
        quota: how many entries a token reads, including sink and window.

    Attributes:
        view: the prompt's entries, followed by the answer's entries that tokens choose among.
        answer: all of the answer's entries.
        residual: cluster means of unread entries. None before `fit_residual`, or if tokens choose all entries or none.
        n_prompt: number of entries in the prompt.
        n_sink: number of entries in the sink.
        choice_stop: position after the last entry that tokens choose among.
    """

    residual: Residual | None = None

    def __init__(self, prompt: FullView, quota: Quota):
        """Set where the sink ends and the window starts, and start an empty answer."""
        self.n_prompt = len(prompt)
        self.prompt = prompt
        self._batch_and_heads = prompt.key_reader().shape[:2]
        self.answer = KVCache()
        self.view = prompt.followed_by(MemoryStore(cache=self.answer))
        self.n_sink = min(quota.n_sink, self.n_prompt)
        self.choice_stop = max(self.n_sink, self.n_prompt - quota.n_window)
        self._max_chosen = max(0, quota.entries - quota.n_sink - self.n_window)
        self._set_always_read()

    def __deepcopy__(self, memo: dict) -> TokenRanking:
        """Copy the ranking, but share the prompt's entries."""
        duplicate = copy.copy(self)
        duplicate.answer = copy.deepcopy(self.answer, memo)
        duplicate.view = self.prompt.followed_by(MemoryStore(cache=duplicate.answer))
        duplicate.view.index = copy.deepcopy(self.view.index)
        duplicate.view.extend(len(self.view))
        return duplicate

    @property
    def answer_buffers(self) -> Pair:
        """Return the answer's buffers. The answer must have at least one entry."""
        keys: Any = self.answer.keys
        values: Any = self.answer.values
        return keys, values

    @property
    def n_window(self) -> int:
        """Return the number of entries at the end of the prompt that every token reads."""
        return max(0, self.n_prompt - self.choice_stop)

    @property
    def n_chosen(self) -> int:
        """Return the number of entries that a token chooses."""
        return min(self._max_chosen, self.choice_stop - self.n_sink)

    @property
    def n_newest(self) -> int:
        """Return the number of entries at or after `choice_stop`. Every token reads all of them."""
        return self.n_prompt + self.answer.offset - self.choice_stop

    @property
    def n_means(self) -> int:
        """Return the number of cluster means that a token reads."""
        return 0 if self.residual is None else self.residual.clusters.n_clusters

    def choose(self, captured: CapturedQueries, start: int) -> mx.array:
        """Choose one set of entries for all captured tokens, the first of which is at position `start`.

        Returns: positions, uint32 `(B, n_kv_heads, n_chosen)`.
        """
        indices = range(start, start + captured.queries.shape[2])
        queries = Queries(captured.queries, indices, captured.scale, captured.sinks)
        return self._best_positions(queries, self.choice_stop)

    def read(self, positions: mx.array | None) -> Pair:
        """Return the keys and values that a token reads.

        Cluster means come first, then the chosen entries, then the entries that every token reads.

        Args:
            positions: positions of the chosen entries, uint32 `(B, n_kv_heads, n)`. If None, only the entries that
                every token reads are returned.
        """
        parts: list[Pair] = []
        gathered_positions = mx.broadcast_to(
            self._always_read, (*self._batch_and_heads, self._always_read.size)
        )
        if positions is not None:
            if self.residual is not None:
                parts.append((self.residual.clusters.keys, self.residual.clusters.values))
            gathered_positions = mx.concatenate([positions, gathered_positions], axis=-1)
        if gathered_positions.size > 0:
            parts.append(self.view.gather(gathered_positions))
        if self.answer.offset > 0:
            # Tokens choose among the answer's entries before `first_row`, and read all of the others.
            first_row = max(0, self.choice_stop - self.n_prompt)
            parts.append(slice_rows(self.answer_buffers, first_row, self.answer.offset))
        return concatenate_rows(*parts)

    def choose_up_to(self, stop: int) -> None:
        """Move `choice_stop` to a later position, so that tokens choose among the entries before it.

        Answer entries that become choosable are added to the index, if there is one. If there is a residual, they form
        a new cluster.
        """
        n_in_view = len(self.view)
        reaches_new_entries = stop > n_in_view
        self.choice_stop = stop
        self._set_always_read()
        if reaches_new_entries:
            self.view.extend(stop)
        if self.residual is None:
            return
        clusters = self.residual.clusters
        if reaches_new_entries:
            new_clusters = cluster_entries(self.view, n_in_view)
            clusters = clusters.followed_by(new_clusters)
        choosable = clusters.sizes_between(self.n_sink, self.choice_stop)
        self.residual = self.residual._replace(clusters=clusters, choosable=choosable)

    def _set_always_read(self) -> None:
        """Update the positions in the prompt that every token reads: sink and window."""
        sink = range(self.n_sink)
        window = range(min(self.choice_stop, self.n_prompt), self.n_prompt)
        self._always_read = mx.array([*sink, *window], mx.uint32)

    def _best_positions(self, queries: Queries, stop: int) -> mx.array:
        """Return the positions of the best entries between the sink and `stop`, uint32 `(B, n_kv_heads, n)`."""
        if self.view.index is not None:
            scores = self.view.index.relevance(queries, stop)
        else:
            votes = attention_votes(self.view.key_reader(), queries)
            scores = -1 / votes  # `best_positions` needs scores of at most 0
        choosable_scores = scores[..., self.n_sink : stop]
        return best_positions(choosable_scores, self._max_chosen, first=self.n_sink)

    def fit_residual(
        self, queries: Queries, earlier_clusters: CompleteBlocks | None = None
    ) -> None:
        """Cluster all entries, and fit each head's mass and temperature to the prompt's last queries.

        Do nothing if tokens choose all entries or none.

        Args:
            queries: the prompt's last queries.
            earlier_clusters: clusters that an earlier turn made of the first entries, or None.
        """
        n_choosable = self.choice_stop - self.n_sink
        has_no_choice = self.n_chosen in (0, n_choosable)
        if has_no_choice:
            return
        clusters = self._cluster_all(earlier_clusters)
        queries = queries.latest(FITTING_QUERIES)
        read_masks: list[mx.array] = []  # one for each query
        for i in range(len(queries.indices)):
            read_masks.append(self._mask_of_read_entries(queries.between(i, i + 1)))
            # Evaluate the masks one by one, so that the scores of only one query are in memory.
            mx.async_eval(read_masks)
        first_position = queries.indices.start
        window_start = max(self.n_sink, first_position - self.n_window)
        example = Example(
            queries=queries.vectors * queries.scale,
            is_read=mx.concatenate(read_masks, axis=2),
            middle=range(self.n_sink, window_start),
            start=first_position,
            sinks=queries.sinks,
        )
        # Process all queries together, so that entries in files are read only once.
        squared_distances = distances(self.view, clusters, example)
        log_mass, temperature = best_factors(squared_distances)
        choosable = clusters.sizes_between(self.n_sink, self.choice_stop)
        self.residual = Residual(clusters, choosable, log_mass, temperature)

    def _cluster_all(self, earlier_clusters: CompleteBlocks | None) -> Clusters:
        """Return the clusters of all entries. Entries in `earlier_clusters` are not clustered again."""
        if earlier_clusters is None:
            return cluster_entries(self.view)
        n_clustered = earlier_clusters.n_entries
        clusters = earlier_clusters.to_clusters()
        if n_clustered == len(self.view):
            return clusters
        later_clusters = cluster_entries(self.view, n_clustered)
        return clusters.followed_by(later_clusters)

    def _mask_of_read_entries(self, query: Queries) -> mx.array:
        """Return the mask of entries that a prompt token would read if it belonged to the answer.

        Args:
            query: the token's queries and position.

        Returns: bool `(B, n_kv_heads, 1, n)`.
        """
        own_position = query.indices.start
        window_start = max(self.n_sink, own_position - self.n_window)
        positions = mx.arange(len(self.view))
        is_sink = positions < self.n_sink
        is_in_window = (positions >= window_start) & (positions <= own_position)
        mask_shape = (*self._batch_and_heads, positions.size)
        is_read = mx.broadcast_to(is_sink | is_in_window, mask_shape)
        has_middle = window_start > self.n_sink
        if has_middle:
            chosen_positions = self._best_positions(query, window_start)
            is_read = mx.put_along_axis(is_read, chosen_positions, mx.array(True), axis=-1)
        return is_read[:, :, None]
