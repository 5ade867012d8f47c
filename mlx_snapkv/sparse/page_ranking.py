"""Choose the pages that a prompt chunk reads, ranked by their mean keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import mlx.core as mx

from ..entries.queries import CapturedQueries
from .full_view import FullView
from .options import PAGE_SIZE, Reach
from .page_means import PageMeans
from .residual import grouped_logits

# Number of evenly spaced queries per chunk that rank the pages. In a needle test of 4,096 tokens (SmolLM2-135M), this
# value gave a KL divergence from the full cache of 0.006, compared with 0.010 for 32 queries and 0.008 for 128.
RANKING_QUERIES = 64


class PageRanking:
    """Selects the earlier entries that a chunk reads: the sink, the pages that its queries rank highest, and a window.

    Args:
        view: view of all of the layer's entries.
        means: mean keys of the pages. Missing means are computed when a chunk needs them.
        reach: how many earlier entries a chunk reads. If there are fewer, the chunk reads all of them.
        last_reach: how many earlier entries the prompt's last tokens read.
        last_from: position where the prompt's last tokens begin.
        choice_stop: chunks that start at or after this position read all entries.
    """

    def __init__(
        self,
        view: FullView,
        means: PageMeans,
        reach: Reach,
        last_reach: Reach,
        last_from: float,
        choice_stop: float,
    ):
        """Store the arguments."""
        self._view = view
        self.means = means
        self._reach = reach
        self._last_reach = last_reach
        self._last_from = last_from
        self._choice_stop = choice_stop
        self._n_sink_pages = reach.n_sink // PAGE_SIZE

    def reads_some(self, start: int) -> bool:
        """Return whether a chunk that starts at `start` reads only some of the earlier entries."""
        return self._choice(start) is not None

    def n_read(self, start: int) -> int:
        """Return the number of earlier entries that a chunk starting at `start` reads."""
        choice = self._choice(start)
        if choice is None:
            return start
        window_start = choice.stop_page * PAGE_SIZE
        n_in_window = start - window_start
        return (self._n_sink_pages + choice.n_pages) * PAGE_SIZE + n_in_window

    def read(self, captured: CapturedQueries, start: int) -> tuple[mx.array, mx.array]:
        """Return the keys and values of the earlier entries that a chunk reads, in order of position.

        Args:
            captured: the chunk's queries, with the heads of a GQA group adjacent.
            start: position of the chunk's first token.
        """
        choice = self._choice(start)
        assert choice is not None, "the chunk reads all entries"
        candidate_pages = range(self._n_sink_pages, choice.stop_page)
        best_pages = self._most_attended_pages(captured, candidate_pages, choice.n_pages)
        pages = mx.sort(best_pages, axis=-1)
        offsets_in_page = mx.arange(PAGE_SIZE, dtype=mx.uint32)
        chosen = (pages[..., None] * PAGE_SIZE + offsets_in_page).flatten(-2)
        sink = mx.arange(self._n_sink_pages * PAGE_SIZE, dtype=mx.uint32)
        window = mx.arange(choice.stop_page * PAGE_SIZE, start, dtype=mx.uint32)
        # The sink and the window are the same for all heads.
        B, H, _ = chosen.shape
        sink = mx.broadcast_to(sink, (B, H, sink.size))
        window = mx.broadcast_to(window, (B, H, window.size))
        return self._view.gather(mx.concatenate([sink, chosen, window], axis=-1))

    def _choice(self, start: int) -> _Choice | None:
        """Return what a chunk that starts at `start` chooses, or None if it reads all earlier entries."""
        reach = self._last_reach if start >= self._last_from else self._reach
        window_start = max(0, start - reach.n_window)
        stop_page = window_start // PAGE_SIZE
        n_pages = reach.n_chosen // PAGE_SIZE
        n_candidates = stop_page - self._n_sink_pages
        if 0 < n_pages < n_candidates and start < self._choice_stop:
            return _Choice(stop_page, n_pages)
        return None

    def _most_attended_pages(
        self, captured: CapturedQueries, candidate_pages: range, n_pages: int
    ) -> mx.array:
        """Return the `n_pages` candidate pages that get the most attention from any single query.

        A sample of the chunk's queries, from all heads of a GQA group, attends to the pages' mean keys.

        Returns: uint32 `(B, n_kv_heads, n_pages)`, unordered.
        """
        n_queries = captured.queries.shape[2]
        step = max(1, n_queries // RANKING_QUERIES)
        # Count back from the end, so that the newest query is always sampled.
        sampled_queries = captured.queries[:, :, ::-step].astype(mx.float32) * captured.scale
        mean_readers = self.means.make_readers(self._view, candidate_pages)
        shares = _largest_shares(sampled_queries, mean_readers)
        best_indices = mx.argpartition(-shares, n_pages - 1, axis=-1)[..., :n_pages]
        return best_indices.astype(mx.uint32) + candidate_pages.start


class _Choice(NamedTuple):
    """A choice of `n_pages` pages from those between the sink and `stop_page`, where the window starts."""

    stop_page: int
    n_pages: int


def _largest_shares(queries: mx.array, mean_readers: Sequence[Callable[[], mx.array]]) -> mx.array:
    """Return the log of each page's largest attention share over all queries, `(B, n_kv_heads, n_pages)`.

    Args:
        queries: scaled float32 queries, `(B, n_heads, n, head_dim)`.
        mean_readers: functions that each return the mean keys of some pages, `(B, n_kv_heads, n, head_dim)` float32.
    """
    if len(mean_readers) == 1:
        [read_all_means] = mean_readers
        return _largest_shares_of_array(queries, read_all_means())
    # Read the means in parts, so that memory does not grow with the text. Each part's logits are computed twice: in the
    # first loop for the softmax denominators, and in the second loop for the shares.
    log_total = mx.array(-mx.inf)
    for read_means in mean_readers:
        logits = grouped_logits(queries, read_means())
        log_total = mx.logaddexp(log_total, mx.logsumexp(logits, axis=-1, keepdims=True))
        mx.eval(log_total)
    shares: list[mx.array] = []
    for read_means in mean_readers:
        # Don't keep a reference to the logits, or those of two parts will be in memory at once.
        shares.append((grouped_logits(queries, read_means()) - log_total).max(axis=(2, 3)))
        mx.eval(shares)
    return mx.concatenate(shares, axis=-1)


def _largest_shares_of_array(queries: mx.array, means: mx.array) -> mx.array:
    """Compute `_largest_shares` for means in a single array.

    Queries are processed in groups, because the logits of all queries would take several times as much memory as the
    means.
    """
    B, H, _, D = means.shape
    queries_by_kv_head = queries.reshape(B, H, -1, D)
    n_queries = queries_by_kv_head.shape[2]
    n_at_once = max(1, D // 2)  # the logits then take half as much memory as the means
    largest_shares = _shares_of_queries(queries_by_kv_head[:, :, :n_at_once], means)
    for start in range(n_at_once, n_queries, n_at_once):
        next_queries = queries_by_kv_head[:, :, start : start + n_at_once]
        next_queries = mx.depends(next_queries, [largest_shares])
        largest_shares = mx.maximum(_shares_of_queries(next_queries, means), largest_shares)
    return largest_shares


def _shares_of_queries(queries: mx.array, means: mx.array) -> mx.array:
    """Return the log of each page's largest attention share over queries `(B, n_kv_heads, n, head_dim)`."""
    logits = queries @ means.mT
    log_totals = mx.logsumexp(logits, axis=-1, keepdims=True)
    return (logits - log_totals).max(axis=2)
