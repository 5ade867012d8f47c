"""Ranks pages by their mean keys for the chunks of a prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import mlx.core as mx

from ..entries.queries import Captured
from .full_view import FullView
from .options import PAGE_SIZE, Reach
from .page_means import PageMeans
from .residual import grouped_logits

# Queries of a chunk that rank the pages, evenly spaced. The KL after needles in 4,096 tokens (SmolLM2-135M) was 0.006,
# 0.010 with 32 queries, and 0.008 with 128 queries.
RANKING_QUERIES = 64


class PageRanking:
    """Chooses which entries a chunk reads: the sink, the pages that its queries rank highest, and the newest tokens.

    Args:
        view: all entries of the layer.
        means: mean keys of the pages, which grow with the view.
        reach: how many entries a chunk reads; if there are no more, it reads all of them.
        last: how many entries chunks from position `last_from` on read.
        last_from: position of the prompt's last tokens, which read more.
        chooses: says of a position whether a chunk from there on may choose; if not, it reads all entries.
    """

    def __init__(
        self,
        view: FullView,
        means: PageMeans,
        reach: Reach,
        last: Reach,
        last_from: float,
        chooses: Callable[[int], bool] = lambda start: True,
    ):
        """Take over view and means; nothing is ranked yet."""
        self._view = view
        self.means = means
        self._reach = reach
        self._last = last
        self._last_from = last_from
        self._chooses = chooses
        self._first = reach.n_sink // PAGE_SIZE  # first page that may be chosen

    def reads_all(self, start: int) -> bool:
        """Return whether a chunk from `start` on reads all entries before it."""
        return self._pages(start)[1] == 0

    def n_read(self, start: int) -> int:
        """Return how many entries before it a chunk from `start` on reads."""
        stop, n = self._pages(start)
        return (self._first + n - stop) * PAGE_SIZE + start if n else start

    def read(self, captured: Captured, start: int) -> tuple[mx.array, mx.array]:
        """Return keys and values that a chunk from `start` on reads, in order of position.

        Args:
            captured: the chunk's queries, with the heads of a KV head together.
            start: position of the chunk's first token.
        """
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
        stop = max(0, start - reach.n_window) // PAGE_SIZE
        n = reach.n_chosen // PAGE_SIZE
        reads_all = stop - self._first <= n or not self._chooses(start)
        return stop, 0 if reads_all else n

    def _likeliest(self, captured: Captured, among: range, n: int) -> mx.array:
        """Return the `n` pages that get the largest share of any query's attention.

        The attention is to the pages' mean keys, by sampled queries of all heads of a GQA group.

        Returns: uint32 `(B, n_kv_heads, n)`, in no order.
        """
        heads = captured.heads
        step = max(1, heads.shape[2] // RANKING_QUERIES)
        queries = heads[:, :, ::-step].astype(mx.float32) * captured.scale
        shares = _largest_shares(queries, self.means.parts(self._view, among))
        best = mx.argpartition(-shares, n - 1, axis=-1)[..., :n]
        return best.astype(mx.uint32) + among.start


def _largest_shares(queries: mx.array, parts: Sequence[Callable[[], mx.array]]) -> mx.array:
    """Return the log of the largest attention share that any query gives each page: `(B, n_kv_heads, n_pages)`.

    Args:
        queries: `(B, n_heads, n, head_dim)`, float32 and scaled.
        parts: functions that read the mean keys of a part of the pages each, `(B, n_kv_heads, n, head_dim)` float32.
    """
    if len(parts) == 1:
        return _shares_in_one(queries, parts[0]())
    # The logits of each part are computed twice, so that a longer text takes no more memory.
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
    """Compute `_largest_shares` if all means are in one array.

    A few queries come at a time: the logits of all would take several times the memory of the means.
    """
    B, H, _, D = means.shape
    queries = queries.reshape(B, H, -1, D)
    few = max(1, queries.shape[3] // 2)
    largest: list[mx.array] = []
    for start in range(0, queries.shape[2], few):
        logits = mx.depends(queries[:, :, start : start + few], largest) @ means.mT
        shares = (logits - mx.logsumexp(logits, axis=-1, keepdims=True)).max(axis=2)
        largest = [mx.maximum(shares, *largest) if largest else shares]
    return largest[0]
