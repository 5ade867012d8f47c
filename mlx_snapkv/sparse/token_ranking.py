"""The entries among which the tokens of an answer choose, ranked by an index or by their exact votes."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx

from ..entries.attention import attention_votes
from ..entries.entries import Entries
from ..entries.quantization import n_rows, rows
from ..entries.queries import Captured, Queries
from ..entries.quota import Quota
from .clusters import Clusters, WholeBlocks, clusters_of
from .compiled import compiled
from .full_view import FullView
from .residual import WEIGHING_QUERIES, Example, Rest, best_factors, distances
from .selection import n_of_groups, top_of_groups
from .stores import MemoryStore


class TokenRanking:
    """Chooses what a token reads between the sink and the window: the entries that its own queries rank highest, and
    the means of the rest, if they are weighed.

    Args:
        prompt: its entries; its index ranks them, or if it has none, their exact votes.
        quota: how many entries a token reads: sink and window always, the others by its queries.
    """

    rest: Rest | None = None
    n_read: int  # entries that a token chooses

    def __init__(self, prompt: FullView, quota: Quota):
        n = len(prompt)
        # The view has more, once tokens choose among the answer's entries.
        self._prompt = self.view = prompt
        self._answer: MemoryStore | None = None  # those
        self.n_first = min(quota.n_sink, n)  # entries of the sink
        self._stop = max(self.n_first, n - quota.n_window)  # entries from here on are always read
        self._n_chosen = max(0, quota.entries - quota.n_sink - (n - self._stop))
        self._count()

    def always_read(self) -> tuple[mx.array, mx.array]:
        """Return keys and values of the prompt's entries that every token reads: the sink and the window."""
        ends = [mx.arange(self.n_first), mx.arange(self._stop, len(self._prompt))]
        places = mx.concatenate(ends).astype(mx.uint32)
        return self._prompt.gather(mx.broadcast_to(places, (*self._heads, places.size)))

    @staticmethod
    def can_weigh(layer: Any) -> bool:
        """Return whether a layer's attention function takes a bias for each of its query heads."""
        family = layer.family
        return family.asks_to_hide and not (family.tiled or layer.borrowers or layer.cap)

    @property
    def n_window(self) -> int:
        """Return the number of the prompt's last entries, which every token reads."""
        return max(0, len(self._prompt) - self._stop)

    @property
    def n_means(self) -> int:
        """Return the number of means of the rest, which a token reads, too."""
        return 0 if self.rest is None else self.rest.clusters.n

    def choose(
        self, captured: Captured, start: int
    ) -> tuple[tuple[mx.array, mx.array], mx.array | None]:
        """Return keys and values that the queries of tokens from `start` on choose together, and the rest's bias."""
        heads, scale, sinks, *_ = captured
        tokens = range(start, start + heads.shape[2])
        asked = Queries(heads, tokens, scale, sinks, cap=self.view.layer.cap)
        scores = self._scores(asked, self._stop)
        if self.rest is None:
            places, bias = top_of_groups(scores, *self._among), None
        else:
            places, bias = _choice_and_bias(self.rest, heads, scale, scores, *self._among)
        return self.view.gather(places), bias

    def choose_among(self, oldest: tuple[mx.array, mx.array]) -> None:
        """Let later tokens choose among these entries, too: the oldest after the sink that were always read."""
        n = n_rows(oldest)
        n_known = len(self.view)
        n_new = self._stop + n - n_known
        if n_new > 0:  # the answer's, which are not in the view
            self._extend_view(Entries(*rows(oldest, n - n_new, n)))
        self._stop += n
        self._count()
        if self.rest is not None:
            clusters = self.rest.clusters
            if n_new > 0:
                clusters = clusters.followed_by(clusters_of(self.view, n_known))
            self.rest = self.rest._replace(clusters=clusters, choosable=self._choosable(clusters))

    def _count(self) -> None:
        """Note how many entries a token chooses."""
        n = self._stop - self.n_first
        self.n_read = n_of_groups(n, self._n_chosen, len(self.view)) if self._n_chosen else 0

    def _scores(self, asked: Queries, stop: int) -> mx.array:
        """Return scores of the entries between sink and `stop`, for `top_of_groups`: 0 at most, and rising with the
        queries' attention."""
        if self.view.index is not None:
            scores = self.view.index.relevance(asked, stop)
        else:
            scores = -1 / attention_votes(self.view.blocks(), asked)
        return scores[..., self.n_first : stop]

    def _choosable(self, clusters: Clusters) -> mx.array:
        return clusters.sizes_between(self.n_first, self._stop)

    def _extend_view(self, entries: Entries) -> None:
        if self._answer is None:
            self._answer = MemoryStore()
            self.view = self._prompt.followed_by(self._answer)
            self.view.index = copy.deepcopy(self._prompt.index)
        n = len(self.view)
        self._answer.append(entries)
        if self.view.index is not None:
            self.view.index.append(self.view.read_keys(n, len(self.view)))

    def weigh_rest(self, observed: Queries, held: WholeBlocks | None = None) -> None:
        """Weigh the means of what a token does not read for a prompt's last queries, as they vote over all entries.

        Nothing is weighed where a token reads everything, or where an attention function takes no bias. Clusters of the
        first entries may be `held`.
        """
        reads_all = self.n_read in (0, self._stop - self.n_first)
        if reads_all or not self.can_weigh(self.view.layer):
            return
        clusters, asked = self._clusters(held), observed.latest(WEIGHING_QUERIES)
        read = []
        for i in range(len(asked.places)):
            read.append(self._would_read(asked.between(i, i + 1)))
            mx.eval(read)
        start = asked.places.start
        example = Example(
            asked.heads * asked.scale,
            mx.concatenate(read, axis=2),
            range(self.n_first, max(self.n_first, start - self.n_window)),
            start,
            asked.sinks,
        )
        # For all queries together: the entries may be in files.
        factors = best_factors(distances(self.view, clusters, example))
        self.rest = Rest(clusters, self._choosable(clusters), *factors)

    def _clusters(self, held: WholeBlocks | None) -> Clusters:
        """Return the clusters of all entries; clusters of the first entries may be `held`."""
        if held is None:
            return clusters_of(self.view)
        known, n = held.clusters(), held.n_entries
        return known if n == len(self.view) else known.followed_by(clusters_of(self.view, n))

    def _would_read(self, one: Queries) -> mx.array:
        """Return which entries a token of the prompt would read as a token of the answer does, bool `(B, n_kv_heads,
        1, n)`."""
        own, every = one.places.start, mx.arange(len(self.view))
        stop = max(self.n_first, own - self.n_window)
        read = (every < self.n_first) | ((every >= stop) & (every <= own))
        read = mx.broadcast_to(read, (*self._heads, every.size))
        if stop > self.n_first:
            places = top_of_groups(self._scores(one, stop), *self._among)
            read = mx.put_along_axis(read, places, mx.array(True), axis=-1)
        return read[:, :, None]

    @property
    def _among(self) -> tuple[int, int, int]:
        """Return how many places a token chooses, the first that it may choose, and the number of entries."""
        return self._n_chosen, self.n_first, len(self.view)

    @property
    def _heads(self) -> tuple[int, ...]:
        """`(B, n_kv_heads)`."""
        return self.view.blocks().shape[:2]

    def __deepcopy__(self, memo: dict) -> TokenRanking:
        """A copy that chooses from the same entries of the prompt."""
        other = copy.copy(self)
        if self._answer is not None:
            other._answer = MemoryStore(cache=copy.deepcopy(self._answer.cache, memo))
            other.view = self._prompt.followed_by(other._answer)
            other.view.index = copy.deepcopy(self.view.index)
        return other


@compiled
def _choice_and_bias(
    rest: Rest, queries: mx.array, scale: float, scores: mx.array, *among: int
) -> tuple[mx.array, mx.array]:
    """`top_of_groups`, and the rest's bias for queries that choose so."""
    places = top_of_groups(scores, *among)
    return places, rest.bias(queries, scale, places)
