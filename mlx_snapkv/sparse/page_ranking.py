"""Pages of neighbours among which the chunks of a prompt choose, ranked by their mean keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from ..entries.queries import Captured
from .full_view import FullView
from .options import PAGE_SIZE, Reach
from .page_means import PageMeans
from .residual import grouped_logits

RANKING_QUERIES = 64  # queries of a chunk that rank the pages, or all of fewer


class PageRanking:
    """What a chunk reads of the entries before it: the sink, pages that its queries rank highest, the newest tokens.

    Args:
        reach: what a chunk reads; one that may read as many entries as there are reads all of them.
        last: what chunks from position `last_from` on read.
    """

    def __init__(
        self,
        view: FullView,
        means: PageMeans,
        reach: Reach,
        last: Reach,
        last_from: float,
    ):
        self._view, self.means = view, means
        self._reach, self._last, self._last_from = reach, last, last_from
        self._first = reach.n_sink // PAGE_SIZE  # first page that may be chosen

    def reads_all(self, start: int) -> bool:
        """Return whether a chunk from `start` on reads everything before it."""
        return self._pages(start)[1] == 0

    def n_read(self, start: int) -> int:
        """Return the number of entries that a chunk from `start` on reads of those before it."""
        stop, n = self._pages(start)
        return (self._first + n - stop) * PAGE_SIZE + start if n else start

    def read(self, captured: Captured, start: int) -> tuple[mx.array, mx.array]:
        """Return keys and values of these entries in order of position, chosen by the chunk's queries, each KV head's
        readers together."""
        stop, n = self._pages(start)
        pages = mx.sort(self._likeliest(captured, range(self._first, stop), n), axis=-1)
        chosen = (pages[..., None] * PAGE_SIZE + mx.arange(PAGE_SIZE, dtype=mx.uint32)).flatten(-2)
        ends = (
            mx.arange(self._first * PAGE_SIZE, dtype=mx.uint32),
            mx.arange(stop * PAGE_SIZE, start, dtype=mx.uint32),
        )
        sink, window = (mx.broadcast_to(x, (*chosen.shape[:2], x.size)) for x in ends)
        return self._view.gather(mx.concatenate([sink, chosen, window], axis=-1))

    def _pages(self, start: int) -> tuple[int, int]:
        """Return `(stop, n)`: a chunk from `start` on chooses `n` of the pages before `stop`, 0 if it reads all."""
        reach = self._last if start >= self._last_from else self._reach
        stop, n = max(0, start - reach.n_window) // PAGE_SIZE, reach.n_chosen // PAGE_SIZE
        return stop, 0 if stop - self._first <= n else n

    def _likeliest(self, captured: Captured, among: range, n: int) -> mx.array:
        """The pages with the largest share of any query's attention, unordered uint32 `(B, n_kv_heads, n)`.

        It is the attention to the pages' mean keys, by sampled queries of all heads of a GQA group.
        """
        heads = captured.heads
        step = max(1, heads.shape[2] // RANKING_QUERIES)
        queries = heads[:, :, ::-step].astype(mx.float32) * captured.scale
        shares = _largest_shares(queries, self.means.of(self._view, among))
        best = mx.argpartition(-shares, n - 1, axis=-1)[..., :n]
        return best.astype(mx.uint32) + among.start


def _largest_shares(queries: mx.array, parts: Sequence[Callable[[], mx.array]]) -> mx.array:
    """Logarithms of the largest share of any query's attention that a page's mean key gets: `(B, n_kv_heads, pages)`.

    Args:
        queries: `(B, n_heads, n, head_dim)`, float32 and scaled.
        parts: give the mean keys `(B, n_kv_heads, ..., head_dim)` float32, a part of the pages each.
    """
    if len(parts) == 1:
        return _shares_in_one(queries, parts[0]())
    # The logits of a part are made twice, so that a longer text takes no more memory.
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
