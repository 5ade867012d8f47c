"""Choose the entries that an answer token reads, with an index or with exact votes."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..entries.attention import attention_votes
from ..entries.quantization import concatenate_rows, slice_rows
from ..entries.queries import CapturedQueries, Queries
from ..entries.quota import Quota
from .clusters import Clusters, WholeBlocks, clusters_of
from .full_view import FullView
from .residual import WEIGHING_QUERIES, Example, Residual, best_factors, distances
from .selection import best_positions
from .stores import MemoryStore

Pair = tuple[mx.array, mx.array]  # keys and values `(B, n_kv_heads, n, head_dim)`


class TokenRanking:
    """Selects the entries that each answer token reads, scored by the token's own queries.

    Entries are numbered by their position in the prompt and the answer:

        [0 : n_first)      the sink, which every token reads
        [n_first : stop)   entries that a token chooses among; the residual represents the unchosen ones
        [stop : n)         the window and the answer's newest entries, which every token reads

    Args:
        prompt: all of the prompt's entries. Without an index, they are ranked by exact votes.
        quota: how many entries a token reads, including sink and window.

    Attributes:
        view: the prompt's entries, and the older entries of the answer, among which tokens choose.
        answer: all of the answer's entries.
        residual: cluster means of unread entries. None before `weigh_residual`, or if tokens read all entries.
        n_prompt: number of entries in the prompt.
        n_first: number of entries in the sink.
        stop: position after the last entry that tokens choose among.
    """

    residual: Residual | None = None

    def __init__(self, prompt: FullView, quota: Quota):
        """Place sink and window in the prompt, and start an empty answer."""
        self.n_prompt = n = len(prompt)
        self._prompt = prompt
        self._heads = prompt.key_reader().shape[:2]  # B and n_kv_heads
        self.answer = KVCache()
        self.view = prompt.followed_by(MemoryStore(cache=self.answer))
        self.n_first = min(quota.n_sink, n)
        self.stop = max(self.n_first, n - quota.n_window)
        self._n_chosen = max(0, quota.entries - quota.n_sink - (n - self.stop))
        self._set_always_read()

    def __deepcopy__(self, memo: dict) -> TokenRanking:
        """Copy the ranking, but share the prompt's entries."""
        other = copy.copy(self)
        other.answer = copy.deepcopy(self.answer, memo)
        other.view = self._prompt.followed_by(MemoryStore(cache=other.answer))
        other.view.index = copy.deepcopy(self.view.index)
        other.view.extend(len(self.view))
        return other

    @property
    def prompt_buffers(self) -> Pair | None:
        """Return the prompt's buffers, or None if entries are quantised or in files; see `EntryView`."""
        return self._prompt.buffers

    @property
    def answer_buffers(self) -> Pair:
        """Return the answer's buffers. The answer must have at least one entry."""
        keys: Any = self.answer.keys
        values: Any = self.answer.values
        return keys, values

    @property
    def n_window(self) -> int:
        """Return the number of entries at the end of the prompt that every token reads."""
        return max(0, self.n_prompt - self.stop)

    @property
    def n_read(self) -> int:
        """Return the number of entries that a token chooses."""
        return min(self._n_chosen, self.stop - self.n_first)

    @property
    def n_newest(self) -> int:
        """Return the number of entries from the start of the window on, all of which every token reads."""
        return self.n_prompt + self.answer.offset - self.stop

    @property
    def n_means(self) -> int:
        """Return the number of cluster means that a token reads."""
        return 0 if self.residual is None else self.residual.clusters.n

    def choose(self, captured: CapturedQueries, start: int) -> mx.array:
        """Choose one set of entries for the queries of all tokens from position `start` on.

        Returns: positions, uint32 `(B, n_kv_heads, n_read)`.
        """
        heads, scale, sinks, *_ = captured
        queries = Queries(heads, range(start, start + heads.shape[2]), scale, sinks)
        return self._best(queries, self.stop)

    def read(self, positions: mx.array | None) -> Pair:
        """Return the keys and values that a token reads: cluster means, chosen entries, and what all tokens read.

        Args:
            positions: positions of the chosen entries, uint32 `(B, n_kv_heads, n)`. None returns only the entries that
                all tokens read.
        """
        parts: list[Pair] = []
        always = mx.broadcast_to(self._always_read, (*self._heads, self._always_read.size))
        if positions is not None:
            if self.residual is not None:
                parts.append((self.residual.clusters.keys, self.residual.clusters.values))
            always = mx.concatenate([positions, always], axis=-1)
        if always.size:
            parts.append(self.view.gather(always))
        if self.answer.offset:
            start = max(0, self.stop - self.n_prompt)
            parts.append(slice_rows(self.answer_buffers, start, self.answer.offset))
        return concatenate_rows(*parts)

    def choose_up_to(self, stop: int) -> None:
        """Move `stop` to a later position, so that tokens choose among the entries before it instead of reading all.

        Entries of the answer are indexed, and form a new cluster.
        """
        n_before = len(self.view)
        has_new_entries = stop > n_before
        self.stop = stop
        self._set_always_read()
        if has_new_entries:
            self.view.extend(stop)
        if self.residual is None:
            return
        clusters = self.residual.clusters
        if has_new_entries:
            clusters = clusters.followed_by(clusters_of(self.view, n_before))
        choosable = self._choosable(clusters)
        self.residual = self.residual._replace(clusters=clusters, choosable=choosable)

    def _set_always_read(self) -> None:
        """Update the positions in the prompt that every token reads: sink and window."""
        window = range(min(self.stop, self.n_prompt), self.n_prompt)
        self._always_read = mx.array([*range(self.n_first), *window], mx.uint32)

    def _best(self, queries: Queries, stop: int) -> mx.array:
        """Return the positions of the best entries between the sink and `stop`, uint32 `(B, n_kv_heads, n)`."""
        if self.view.index is not None:
            scores = self.view.index.relevance(queries, stop)
        else:
            scores = -1 / attention_votes(self.view.key_reader(), queries)
        return best_positions(scores[..., self.n_first : stop], self._n_chosen, self.n_first)

    def _choosable(self, clusters: Clusters) -> mx.array:
        """Count the entries in each cluster that a token may choose: `(B, n_kv_heads, n_clusters)`."""
        return clusters.sizes_between(self.n_first, self.stop)

    def weigh_residual(self, queries: Queries, earlier: WholeBlocks | None = None) -> None:
        """Cluster all entries, and fit each head's mass and temperature to the prompt's last queries.

        Do nothing if tokens read all entries.

        Args:
            queries: the prompt's last queries.
            earlier: clusters of the first entries from an earlier turn, if there are any.
        """
        if self.n_read in (0, self.stop - self.n_first):
            return
        clusters = self._clusters(earlier)
        queries = queries.latest(WEIGHING_QUERIES)
        read = []
        for i in range(len(queries.indices)):
            read.append(self._would_read(queries.between(i, i + 1)))
            mx.async_eval(read)  # limits memory to the scores of one query
        start = queries.indices.start
        example = Example(
            queries.vectors * queries.scale,
            mx.concatenate(read, axis=2),
            range(self.n_first, max(self.n_first, start - self.n_window)),
            start,
            queries.sinks,
        )
        # Process all queries together, because entries may have to be read from files.
        factors = best_factors(distances(self.view, clusters, example))
        self.residual = Residual(clusters, self._choosable(clusters), *factors)

    def _clusters(self, earlier: WholeBlocks | None) -> Clusters:
        """Return the clusters of all entries. Only entries without an `earlier` cluster are clustered."""
        if earlier is None:
            return clusters_of(self.view)
        clusters = earlier.clusters()
        if earlier.n_entries == len(self.view):
            return clusters
        return clusters.followed_by(clusters_of(self.view, earlier.n_entries))

    def _would_read(self, query: Queries) -> mx.array:
        """Return the mask of entries that a prompt token would read if it belonged to the answer.

        Args:
            query: the token's queries and position.

        Returns: bool `(B, n_kv_heads, 1, n)`.
        """
        position = query.indices.start
        positions = mx.arange(len(self.view))
        stop = max(self.n_first, position - self.n_window)
        read = (positions < self.n_first) | ((positions >= stop) & (positions <= position))
        read = mx.broadcast_to(read, (*self._heads, positions.size))
        if stop > self.n_first:
            read = mx.put_along_axis(read, self._best(query, stop), mx.array(True), axis=-1)
        return read[:, :, None]
