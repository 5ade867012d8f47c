"""Pages of neighbours among which the chunks of a prompt choose, ranked by their mean keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import mlx.core as mx

from ..entries.queries import Captured
from ..entries.rest import grouped_logits
from ..policies.sparse import PAGE, Reach
from .full_view import FullView
from .page_means import PageMeans

SAMPLED = 64  # queries of a chunk that rank the pages, or all of fewer


class PageRanking:
    """What a chunk reads of the entries before it: the sink, pages that its queries rank highest, the newest tokens.

    Args:
        reach: what a chunk reads; one that may read as many entries as there are reads all of them.
        last: what those from position `last_from` on read.
        near: how far before a chunk the pages may be among which it chooses, unless it is one of the last; beyond the
            trained length these stand where they are, and the sink before them.
    """

    def __init__(
        self,
        view: FullView,
        means: PageMeans,
        reach: Reach,
        last: Reach,
        last_from: float,
        near: int | None = None,
    ):
        self._view, self.means = view, means
        self._reach, self._last, self._last_from, self._near = reach, last, last_from, near
        self._first = reach.n_sink // PAGE  # first page that may be chosen

    def reads_all(self, start: int) -> bool:
        """Whether a chunk from `start` on reads everything before it."""
        return self._pages(start)[2] == 0

    def n_read(self, start: int) -> int:
        """Entries that it reads of those before it."""
        _, stop, n = self._pages(start)
        return (self._first + n - stop) * PAGE + start if n else start

    def read(self, captured: Captured, start: int) -> Iterator[tuple[mx.array, mx.array]]:
        """Their keys and values, in order of position, chosen by its queries, each KV head's readers together."""
        first, stop, n = self._pages(start)
        pages = mx.sort(self._likeliest(captured, start, range(first, stop), n), axis=-1)
        chosen = (pages[..., None] * PAGE + mx.arange(PAGE, dtype=mx.uint32)).flatten(-2)
        ends = (
            mx.arange(self._first * PAGE, dtype=mx.uint32),
            mx.arange(stop * PAGE, start, dtype=mx.uint32),
        )
        sink, window = (mx.broadcast_to(x, (*chosen.shape[:2], x.size)) for x in ends)
        if first == self._first:
            places = mx.concatenate([sink, chosen, window], axis=-1)
            yield self._view.lined_up(places, start, start).plain()
            return
        near = self._view.gather(mx.concatenate([chosen, window], axis=-1))
        yield self._view.lined_up(sink, start, first * PAGE).plain()
        yield near.plain()

    def forget(self) -> None:
        """Entries have been rolled back."""
        self.means.truncate(len(self._view) // PAGE)

    def _pages(self, start: int) -> tuple[int, int, int]:
        """`(first, stop, n)`: a chunk from `start` on chooses `n` of the pages `[first, stop)`, 0 if it reads all."""
        is_last = start >= self._last_from
        reach, first = self._last if is_last else self._reach, self._first
        stop, n = max(0, start - reach.n_window) // PAGE, reach.n_chosen // PAGE
        if self._near is not None and not is_last:
            first = max(first, -(-(start - self._near) // PAGE))
        is_all = first == self._first and stop - first <= n
        return first, stop, 0 if is_all else min(n, stop - first)

    def _likeliest(self, captured: Captured, start: int, among: range, n: int) -> mx.array:
        """The pages with the largest share of any query's attention, unordered uint32 `(B, n_kv_heads, n)`.

        It is the attention to the pages' mean keys, by sampled queries of all heads of a GQA group.
        """
        heads = captured.heads
        step = max(1, heads.shape[2] // SAMPLED)
        queries = heads[:, :, ::-step].astype(mx.float32) * captured.scale
        parts = [
            partial(self._seen, start, pages, means)
            for pages, means in self.means.of(self._view, among)
        ]
        shares = _largest_shares(queries, parts)
        best = mx.argpartition(-shares, n - 1, axis=-1)[..., :n]
        return best.astype(mx.uint32) + among.start

    def _seen(self, start: int, pages: range, means: Callable[[], mx.array]) -> mx.array:
        """Mean keys of pages, as queries from `start` on see them."""
        keys = means()
        places = mx.arange(pages.start * PAGE + PAGE // 2, pages.stop * PAGE, PAGE)
        return self._view.turned(keys, mx.broadcast_to(places, keys.shape[:3]), start)


def _largest_shares(queries: mx.array, parts: Sequence[Callable[[], mx.array]]) -> mx.array:
    """Logarithms of the largest share of any query's attention that a page's mean key gets: `(B, n_kv_heads, pages)`.

    Args:
        queries: `(B, n_heads, n, head_dim)`, float32 and scaled.
        parts: give the mean keys `(B, n_kv_heads, ..., head_dim)` float32, a part of the pages each.
    """
    if len(parts) == 1:
        return _shares_in_one(queries, parts[0]())
    # Of a part at a time, so that a longer text takes no more memory: the logits are made twice.
    total = mx.array(-mx.inf)
    for part in parts:
        logits = grouped_logits(queries, part())
        total = mx.logaddexp(total, mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(total)
    shares: list[mx.array] = []
    for part in parts:
        shares.append((grouped_logits(queries, part()) - total).max(axis=(2, 3)))
        mx.eval(shares)
    return mx.concatenate(shares, axis=-1)


def _shares_in_one(queries: mx.array, means: mx.array) -> mx.array:
    """`_largest_shares` of all pages. Queries come a few at a time: the logits of all would take several times the
    memory of the means."""
    B, H, _, D = means.shape
    queries = queries.reshape(B, H, -1, D)
    few = max(1, queries.shape[3] // 2)
    largest: list[mx.array] = []
    for start in range(0, queries.shape[2], few):
        logits = mx.depends(queries[:, :, start : start + few], largest) @ means.mT
        shares = (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).max(axis=2)
        largest = [mx.maximum(shares, *largest) if largest else shares]
    return largest[0]
