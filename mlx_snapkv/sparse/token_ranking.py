"""Chooses the entries that a token of an answer reads, by an index or by exact votes."""

from __future__ import annotations

import copy

import mlx.core as mx

from ..entries.attention import attention_votes
from ..entries.entries import Entries
from ..entries.quantization import n_rows, rows
from ..entries.queries import Captured, Queries
from ..entries.quota import Quota
from .clusters import Clusters, WholeBlocks, clusters_of
from .compiled import compiled
from .full_view import FullView
from .residual import WEIGHING_QUERIES, Example, Residual, best_factors, distances
from .selection import n_of_groups, top_of_groups
from .stores import MemoryStore


class TokenRanking:
    """Chooses the entries between sink and window that a token reads: those that its own queries rank highest.

    Args:
        prompt: all entries of the prompt; without an index they are ranked by their exact votes.
        quota: how many entries a token reads: sink and window always, the others by its queries.

    Attributes:
        view: entries of the prompt, and entries of the answer that tokens choose among.
        residual: the weighed means of unread entries; None before `weigh_residual`, or if nothing can be weighed.
        n_first: entries of the sink.
        n_read: entries that a token chooses.
    """

    residual: Residual | None = None
    n_read: int

    def __init__(self, prompt: FullView, quota: Quota):
        n = len(prompt)
        self._prompt = self.view = prompt
        self._answer: MemoryStore | None = None  # entries of the answer that tokens choose among
        self.n_first = min(quota.n_sink, n)
        self._stop = max(self.n_first, n - quota.n_window)  # entries from here on are always read
        self._n_chosen = max(0, quota.entries - quota.n_sink - (n - self._stop))
        self._count()

    def always_read(self) -> tuple[mx.array, mx.array]:
        """Return keys and values of the prompt's entries that every token reads: the sink and the window."""
        ends = [mx.arange(self.n_first), mx.arange(self._stop, len(self._prompt))]
        places = mx.concatenate(ends).astype(mx.uint32)
        return self._prompt.gather(mx.broadcast_to(places, (*self._heads, places.size)))

    @property
    def n_window(self) -> int:
        """Return the number of the prompt's last entries, which every token reads."""
        return max(0, len(self._prompt) - self._stop)

    @property
    def n_means(self) -> int:
        """Return the number of cluster means that a token reads."""
        return 0 if self.residual is None else self.residual.clusters.n

    def choose(
        self, captured: Captured, start: int
    ) -> tuple[tuple[mx.array, mx.array], mx.array | None]:
        """Choose for the queries of the tokens from position `start` on, all together.

        Returns: keys and values `(B, n_kv_heads, n_read, head_dim)`, and the bias of the means; see `Residual.bias`.
        """
        heads, scale, sinks, *_ = captured
        tokens = range(start, start + heads.shape[2])
        queries = Queries(heads, tokens, scale, sinks)
        scores = self._scores(queries, self._stop)
        if self.residual is None:
            places = top_of_groups(scores, *self._among)
            bias = None
        else:
            places, bias = _chosen_and_bias(self.residual, heads, scale, scores, *self._among)
        return self.view.gather(places), bias

    def choose_among(self, oldest: tuple[mx.array, mx.array]) -> None:
        """Let later tokens choose among these entries, the oldest ones after the sink that every token has read."""
        n = n_rows(oldest)
        n_viewed = len(self.view)
        n_new = self._stop + n - n_viewed
        if n_new > 0:  # entries of the answer, which are not in the view yet
            self._extend_view(Entries(*rows(oldest, n - n_new, n)))
        self._stop += n
        self._count()
        if self.residual is not None:
            clusters = self.residual.clusters
            if n_new > 0:
                clusters = clusters.followed_by(clusters_of(self.view, n_viewed))
            self.residual = self.residual._replace(
                clusters=clusters, choosable=self._choosable(clusters)
            )

    def _count(self) -> None:
        """Set the number of entries that a token chooses."""
        n = self._stop - self.n_first
        self.n_read = n_of_groups(n, self._n_chosen, len(self.view)) if self._n_chosen else 0

    def _scores(self, queries: Queries, stop: int) -> mx.array:
        """Score the entries between sink and `stop` for `top_of_groups`: `(B, n_kv_heads, stop - n_first)`, at most 0,
        higher for more attention."""
        if self.view.index is not None:
            scores = self.view.index.relevance(queries, stop)
        else:
            scores = -1 / attention_votes(self.view.blocks(), queries)
        return scores[..., self.n_first : stop]

    def _choosable(self, clusters: Clusters) -> mx.array:
        """Count the entries of each cluster that a token may choose: `(B, n_kv_heads, n_clusters)`."""
        return clusters.sizes_between(self.n_first, self._stop)

    def _extend_view(self, entries: Entries) -> None:
        """Append entries of the answer to the view and its index."""
        if self._answer is None:
            self._answer = MemoryStore()
            self.view = self._prompt.followed_by(self._answer)
            self.view.index = copy.deepcopy(self._prompt.index)
        n = len(self.view)
        self._answer.append(entries)
        if self.view.index is not None:
            self.view.index.append(self.view.read_keys(n, len(self.view)))

    def weigh_residual(self, queries: Queries, earlier: WholeBlocks | None = None) -> None:
        """Cluster all entries and find each head's mass and temperature for the prompt's last queries.

        Does nothing if a token reads all entries.

        Args:
            queries: the prompt's last queries, which see all entries before them.
            earlier: clusters of the first entries, if an earlier turn has made them.
        """
        if self.n_read in (0, self._stop - self.n_first):
            return
        clusters = self._clusters(earlier)
        queries = queries.latest(WEIGHING_QUERIES)
        read = []
        for i in range(len(queries.places)):
            read.append(self._would_read(queries.between(i, i + 1)))
            mx.eval(read)
        start = queries.places.start
        example = Example(
            queries.heads * queries.scale,
            mx.concatenate(read, axis=2),
            range(self.n_first, max(self.n_first, start - self.n_window)),
            start,
            queries.sinks,
        )
        # All queries together, because reading the entries may mean reading files.
        factors = best_factors(distances(self.view, clusters, example))
        self.residual = Residual(clusters, self._choosable(clusters), *factors)

    def _clusters(self, earlier: WholeBlocks | None) -> Clusters:
        """Return the clusters of all entries: those of an earlier turn, and new ones of the entries after them."""
        if earlier is None:
            return clusters_of(self.view)
        clusters = earlier.clusters()
        if earlier.n_entries == len(self.view):
            return clusters
        return clusters.followed_by(clusters_of(self.view, earlier.n_entries))

    def _would_read(self, query: Queries) -> mx.array:
        """Return which entries a token of the prompt would read if the answer began with it: bool `(B, n_kv_heads, 1,
        n)`."""
        position = query.places.start
        positions = mx.arange(len(self.view))
        stop = max(self.n_first, position - self.n_window)
        read = (positions < self.n_first) | ((positions >= stop) & (positions <= position))
        read = mx.broadcast_to(read, (*self._heads, positions.size))
        if stop > self.n_first:
            places = top_of_groups(self._scores(query, stop), *self._among)
            read = mx.put_along_axis(read, places, mx.array(True), axis=-1)
        return read[:, :, None]

    @property
    def _among(self) -> tuple[int, int, int]:
        """Return arguments of `top_of_groups`: how many to choose, the first position, and the number of entries."""
        return self._n_chosen, self.n_first, len(self.view)

    @property
    def _heads(self) -> tuple[int, ...]:
        """Return `(B, n_kv_heads)`."""
        return self.view.blocks().shape[:2]

    def __deepcopy__(self, memo: dict) -> TokenRanking:
        """Copy the ranking; the copy shares the prompt's entries."""
        other = copy.copy(self)
        if self._answer is not None:
            other._answer = MemoryStore(cache=copy.deepcopy(self._answer.cache, memo))
            other.view = self._prompt.followed_by(other._answer)
            other.view.index = copy.deepcopy(self.view.index)
        return other


@compiled
def _chosen_and_bias(
    residual: Residual, queries: mx.array, scale: float, scores: mx.array, *among: int
) -> tuple[mx.array, mx.array]:
    """Return `top_of_groups` of the scores, and the bias of the means for this choice."""
    places = top_of_groups(scores, *among)
    return places, residual.bias(queries, scale, places)
