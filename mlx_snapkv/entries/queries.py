"""Record queries for voting, and pass them to policies."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx

from ..errors import SnapKVError
from .query_moments import QueryMoments, Statistics

QueryMap = Callable[[mx.array], mx.array]


class CapturedQueries(NamedTuple):
    """The queries of the tokens in one attention call. The tokens' entries are already in the cache.

    Attributes:
        queries: post-RoPE queries, `(B, n_heads, L, head_dim)`.
        scale: scale of the attention logits.
        sinks: logits of attention sinks, `(n_heads,)`.
        to_key_space: converts `queries`, or some of them, to the vectors that are multiplied by keys.
        from_borrower: whether the queries come from a later layer that reads this layer's entries.
    """

    queries: mx.array
    scale: float
    sinks: mx.array | None = None
    to_key_space: QueryMap = lambda queries: queries
    from_borrower: bool = False


@dataclass(frozen=True)
class Queries:
    """The queries of `n` successive tokens, as policies see them.

    Attributes:
        vectors: post-RoPE queries, `(B, n_heads, n, head_dim)`, with the heads of a GQA group adjacent.
        indices: for each query, the index of its token's entry, which is the last entry that the query sees. The index
            can lie beyond all existing entries, for example if an answer token votes on the prompt's entries.
        scale: scale of the attention logits.
        sinks: logits of attention sinks, `(n_heads,)`. A sink takes a share of the softmax but has no entry.
        start: prompt position of the first query. None means `indices.start`, which is correct if no entry was evicted.
        logit_cap: soft cap on the logits, applied as `logit_cap * tanh(logit / logit_cap)`, or None.
    """

    vectors: mx.array
    indices: range
    scale: float = math.nan
    sinks: mx.array | None = None
    start: int | None = None
    logit_cap: float | None = None

    def between(self, first: int, stop: int) -> Queries:
        """Slice the queries `[first, stop)`."""
        start_position = None if self.start is None else self.start + first
        return replace(
            self,
            vectors=self.vectors[:, :, first:stop],
            indices=self.indices[first:stop],
            start=start_position,
        )

    def latest(self, n: int) -> Queries:
        """Return the last `n` queries, or all if there are fewer."""
        n_queries = len(self.indices)
        return self.between(max(0, n_queries - n), n_queries)


Callback = Callable[["Recorder", mx.array], None]
_callback: ContextVar[Callback | None] = ContextVar("on_queries", default=None)


@contextlib.contextmanager
def on_queries(callback: Callback) -> Iterator[None]:
    """Inside the `with` block, call `callback(cache, queries)` whenever a cache records queries in this thread.

    `queries`, `(B, n_heads, L, head_dim)`, are those of the newest `L` tokens.
    """
    reset_token = _callback.set(callback)
    try:
        yield
    finally:
        _callback.reset(reset_token)


class Recorder:
    """Base class for KV caches that record queries.

    Attributes:
        offset: position of the next token, updated by the cache.
        layer: the cache's `AttentionLayer`, or None if the policy needs no layer.
        scale: scale of the attention logits, NaN before the first query.
        sinks: logits of attention sinks, `(n_heads,)`, or None.
        moments: running sums over queries for `statistics`.
    """

    offset: int
    layer: Any = None

    def __init__(self, *args: Any, **kwargs: Any):
        """Start recording; see `start_recording` for the arguments."""
        super().__init__()
        self.start_recording(*args, **kwargs)

    def start_recording(
        self,
        first: float = 0,
        last: float = math.inf,
        newest: int | None = None,
        statistics_from: int | None = None,
    ) -> None:
        """Discard all recorded queries, and start recording the next tokens' queries.

        Args:
            first: first position whose query is recorded.
            last: position after the last recorded query.
            newest: number of most recent queries to keep. None keeps all.
            statistics_from: first position whose pre-RoPE query is added to the statistics. If it is after `last - 1`,
                they start at `last - 1`. None turns statistics off. Statistics require a `layer`.
        """
        self.first, self.last = first, last
        self.newest = math.inf if newest is None else newest
        self.statistics_from = statistics_from
        self.scale = math.nan
        self.sinks: mx.array | None = None
        # Queries of the newest tokens, one array per layer that reads the entries. Emptied once all these layers have
        # run.
        self._queries_by_reader: list[mx.array] = []
        self._queries: list[mx.array] = []  # `(B, n_heads, n, head_dim)` each, in order of position
        self._stop = 0  # position after the last recorded query
        self.moments = QueryMoments()

    @property
    def waits_for_readers(self) -> bool:
        """Return whether any layer that reads the newest entries has yet to record its queries."""
        return bool(self._queries_by_reader)

    def record(self, captured: CapturedQueries) -> None:
        """Record a call's queries. If several layers share the entries, wait for all layers and join their heads.

        Raises: SnapKVError: another layer reads the entries, but the cache does not know about it.
        """
        n_readers = 1 if self.layer is None else len(self.layer.readers)
        if n_readers == 1 and captured.from_borrower:
            raise SnapKVError(
                "other layers also read these entries: make the prompt cache with mlx_snapkv.prefill"
            )
        # The layer's own call precedes the borrowers' calls, and starts a new list.
        earlier_readers = self._queries_by_reader if captured.from_borrower else []
        queries_by_reader = [*earlier_readers, captured.queries]
        if len(queries_by_reader) < n_readers:
            self._queries_by_reader = queries_by_reader
        else:
            self._queries_by_reader = []
            queries = mx.concatenate(queries_by_reader, axis=1)
            self._record_chunk(captured._replace(queries=queries))

    def _record_chunk(self, captured: CapturedQueries) -> None:
        """Pass a chunk's queries to the `on_queries` callback, add them to the statistics, and store the newest."""
        self.scale = captured.scale
        self.sinks = captured.sinks
        callback = _callback.get()
        if callback is not None:
            callback(self, captured.to_key_space(captured.queries))
        if self.statistics_from is not None:
            self._add_to_statistics(captured)
        self._store_newest_queries(captured)

    def _store_newest_queries(self, captured: CapturedQueries) -> None:
        """Store the chunk's queries at positions `[first, last)`.

        Drop stored queries that are no longer among the `newest`.
        """
        chunk_start = self.offset - captured.queries.shape[2]
        stop = min(self.last, self.offset)
        start = max(self.first, chunk_start, stop - self.newest)
        if start >= stop:
            return
        tokens_were_trimmed = chunk_start < self._stop
        follows_gap = start > self._stop
        if tokens_were_trimmed:
            self._drop_newest_queries(self._stop - chunk_start)
        elif follows_gap:  # recorded queries must be successive
            self._queries = []
        queries = captured.queries[:, :, int(start) - chunk_start : int(stop) - chunk_start]
        # Copy, because a slice would keep the whole chunk alive.
        self._queries.append(mx.contiguous(captured.to_key_space(queries)))
        self._stop = int(stop)
        # Drop the arrays that contain none of the `newest` queries.
        while self.n_queries - self._queries[0].shape[2] >= self.newest:
            self._queries.pop(0)

    def _drop_newest_queries(self, n: int) -> None:
        """Drop the `n` newest recorded queries, or all if there are fewer."""
        n_left = max(0, self.n_queries - n)
        if n_left == 0:
            self._queries = []
            return
        oldest_queries = mx.concatenate(self._queries, axis=2)[:, :, :n_left]
        self._queries = [mx.contiguous(oldest_queries)]

    def _add_to_statistics(self, captured: CapturedQueries) -> None:
        """Add a chunk's queries to the statistics. No position is counted twice."""
        chunk_start = self.offset - captured.queries.shape[2]
        # The query just before `last` is always included.
        first_counted = min(self.statistics_from or 0, self.last - 1)
        start = int(max(first_counted, chunk_start, self.moments.counted_to))
        stop = int(min(self.last, self.offset))
        if start >= stop:
            return
        queries = captured.queries[:, :, start - chunk_start : stop - chunk_start]
        rotated_queries = captured.to_key_space(queries)
        raw_queries = self.layer.undo_rope(rotated_queries, start).astype(mx.float32)
        self.moments = self.moments.with_queries(raw_queries, stop)

    @property
    def statistics(self) -> Statistics | None:
        """Return statistics of the queries counted so far, with heads in the model's order, or None if there are none.

        The cache of an answer keeps the prompt's statistics, and counts no further queries.
        """
        return self.moments.statistics(self.scale, int(min(self.last, self.offset)))

    def make_voters(
        self, queries: mx.array, positions: range, entries_shape: tuple[int, ...]
    ) -> Queries:
        """Return `Queries` that can vote, with entry indices computed from the positions.

        Args:
            queries: `(B, n_heads, n, head_dim)`, with heads in the model's order.
            positions: prompt positions of the queries.
            entries_shape: shape of the entries, `(B, n_kv_heads, T)`. The last entry belongs to the newest token.
        """
        _, n_kv_heads, n_entries, *_ = entries_shape
        # The newest token is at position `offset - 1`, and its entry at index `n_entries - 1`.
        n_evicted = self.offset - n_entries
        indices = range(positions.start - n_evicted, positions.stop - n_evicted)
        vectors = queries
        logit_cap = None
        if self.layer is not None:
            vectors = self.layer.group_heads(queries, n_kv_heads)
            logit_cap = self.layer.logit_cap
        return Queries(
            vectors=vectors,
            indices=indices,
            scale=self.scale,
            sinks=self.sinks,
            start=positions.start,
            logit_cap=logit_cap,
        )

    def recorded_voters(self, entries_shape: tuple[int, ...]) -> Queries | None:
        """Return all recorded queries as voters, or None if the newest tokens' queries were not recorded.

        Args:
            entries_shape: see `make_voters`.
        """
        positions = self.query_positions
        if not positions or positions.stop < min(self.last, self.offset):
            return None
        return self.make_voters(self.queries, positions, entries_shape)

    @property
    def queries(self) -> mx.array:
        """Return the recorded queries in order of position, `(B, n_heads, n, head_dim)`. There must be at least one."""
        all_queries = mx.concatenate(self._queries, axis=2)
        return all_queries[:, :, -len(self.query_positions) :]

    @property
    def query_positions(self) -> range:
        """Return the positions of the recorded queries."""
        n_recorded = int(min(self.n_queries, self.newest))
        return range(self._stop - n_recorded, self._stop)

    @property
    def n_queries(self) -> int:
        """Return the number of queries in memory, which can exceed `newest`."""
        return sum(queries.shape[2] for queries in self._queries)

    @property
    def recorded(self) -> list[mx.array]:
        """Return the recorded queries and the sums over queries. Batches evaluate them after each decoded token."""
        return [*self._queries, *self.moments.sums]

    def inherit_queries(self, other_cache: Any) -> None:
        """Adopt another cache's queries and statistics, as if this cache had recorded them for its newest tokens.

        Do nothing if `other_cache` does not record queries.
        """
        if isinstance(other_cache, Recorder):
            self._queries = list(other_cache._queries)
            self._stop = self.offset
            self.scale = other_cache.scale
            self.sinks = other_cache.sinks
            self.moments = self.moments.with_sums_of(other_cache.moments)
