"""Queries that vote: what a policy sees of them, and what caches need to record those of their own tokens."""

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

Read = Callable[[mx.array], mx.array]


class Captured(NamedTuple):
    """The queries of a call of an attention module, whose entries are already stored."""

    heads: mx.array  # `(B, n_heads, L, head_dim)`
    scale: float
    sinks: mx.array | None = None
    read: Read = lambda heads: heads  # makes of queries what the entries' keys are multiplied by
    borrowed: bool = False  # they are those of a later layer, which reads this one's entries


@dataclass(frozen=True)
class Queries:
    """Queries observed at an attention's own call."""

    heads: mx.array  # `(B, n_heads, n, head_dim)`, post-RoPE, each KV head's readers together
    # The index among the entries of each query's own token, up to which it sees them; perhaps past the last entry.
    places: range
    scale: float = math.nan  # what the attention multiplies its logits by
    # `(n_heads,)` logits of attention sinks, which take a share of the softmax but have no entry.
    sinks: mx.array | None = None
    # The first query's position in the prompt; None is `places.start`, which is right while no entry is missing.
    start: int | None = None
    cap: float | None = None  # logits are bent to stay within it, as `cap * tanh(logit / cap)`

    def between(self, first: int, stop: int) -> Queries:
        """Return the queries from `first` on, before `stop`."""
        heads, places = self.heads[:, :, first:stop], self.places[first:stop]
        start = None if self.start is None else self.start + first
        return replace(self, heads=heads, places=places, start=start)

    def latest(self, n: int) -> Queries:
        return self.between(max(0, len(self.places) - n), len(self.places))


Callback = Callable[["Recorder", mx.array], None]
_callback: ContextVar[Callback | None] = ContextVar("on_queries", default=None)


@contextlib.contextmanager
def on_queries(callback: Callback) -> Iterator[None]:
    """Call `callback` in this thread with every cache that records, and its newest queries `(B, n_heads, L, D)`."""
    token = _callback.set(callback)
    try:
        yield
    finally:
        _callback.reset(token)


class OnQueries:
    """What a KV cache may do with the queries of an attention module's call, besides `record`."""

    # The queries of some layers that read the newest entries are missing.
    waits_for_readers: bool = False

    def attended(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """The entries that the attention function sees, instead of those that it was given."""
        return keys, values

    def asks_again(self) -> bool:
        """Whether the attention module is to be called again, with the entries that its queries have chosen."""
        return False


class Recorder(OnQueries):
    """What a KV cache with an `offset` needs to record queries; the arguments are those of `start_recording`."""

    offset: int
    layer: Any = None  # see `Entries`

    def __init__(self, *wanted: Any, **more: Any):
        super().__init__()
        self.start_recording(*wanted, **more)

    def start_recording(
        self,
        first: float = 0,
        last: float = math.inf,
        newest: int | None = None,
        statistics_from: int | None = None,
    ) -> None:
        """Forget what was recorded before, and record from now on.

        Args:
            first, last: logical positions whose queries are recorded, in whatever chunks they come.
            newest: how many of those at most, the latest ones; None is all.
            statistics_from: count statistics of the pre-RoPE queries of the positions from here to `last`, and of
                the one before `last` in any case, which needs `layer`; None counts nothing.
        """
        self.first, self.last = first, last
        self.newest = math.inf if newest is None else newest
        self.statistics_from = statistics_from
        self.scale = math.nan  # this and the sinks come with the queries
        self.sinks: mx.array | None = None
        self._by_reader: list[mx.array] = []  # of one call, of the readers so far
        self._queries: list[mx.array] = []
        self._stop = 0  # the position after the last query's
        self.moments = QueryMoments()

    @property
    def waits_for_readers(self) -> bool:  # type: ignore[override]
        return bool(self._by_reader)

    def record(self, captured: Captured) -> None:
        """Record a call's queries; nothing before those of all the layer's readers have come, whose heads are joined.

        Raises: SnapKVError: it is not known how many layers read the entries.
        """
        n_readers = 1 if self.layer is None else len(self.layer.readers)
        if n_readers == 1 and captured.borrowed:
            raise SnapKVError(
                "other layers read these entries, too: make the prompt cache with mlx_snapkv.prefill"
            )
        every = [*self._by_reader, captured.heads] if captured.borrowed else [captured.heads]
        self._by_reader = every if len(every) < n_readers else []
        if not self._by_reader:
            self._take_queries(captured._replace(heads=mx.concatenate(every, axis=1)))

    def _take_queries(self, captured: Captured) -> None:
        queries, self.scale, self.sinks, read, _ = captured
        if (callback := _callback.get()) is not None:
            callback(self, read(queries))
        start = self.offset - queries.shape[2]
        if self.statistics_from is not None:
            self._count_queries(queries, start, read)
        b = min(self.last, self.offset)
        a = max(self.first, start, b - self.newest)
        if a >= b:
            return
        if start < self._stop:  # tokens were trimmed meanwhile
            kept = max(0, self.n_queries - (self._stop - start))
            earlier = [mx.concatenate(self._queries, axis=2)[:, :, :kept]] if kept else []
            self._queries = [mx.contiguous(x) for x in earlier]
        elif a > self._stop:
            self._queries = []
        # A slice would keep the whole chunk alive.
        self._queries.append(mx.contiguous(read(queries[:, :, int(a) - start : int(b) - start])))
        self._stop = int(b)
        while self.n_queries - self._queries[0].shape[2] >= self.newest:
            self._queries.pop(0)

    def _count_queries(self, queries: mx.array, start: int, read: Read) -> None:
        """Add the queries of a call to the statistics, each position's once."""
        a = int(max(min(self.statistics_from or 0, self.last - 1), start, self.moments.counted_to))
        b = int(min(self.last, self.offset))
        if a >= b:
            return
        counted = read(queries[:, :, a - start : b - start])
        raw = self.layer.undo_rope(counted, a).astype(mx.float32)
        self.moments = self.moments.with_queries(raw, b)

    @property
    def statistics(self) -> Statistics | None:
        """Of the queries counted so far, heads in their own order; None if there are none."""
        return self.moments.statistics(self.scale, int(min(self.last, self.offset)))

    def voters(self, queries: mx.array, asked: range, shape: tuple[int, ...]) -> Queries:
        """Queries of logical positions, to vote for entries `(B, n_kv_heads, T)` that end with the newest."""
        first, cap = self.offset - shape[2], None
        if self.layer is not None:
            queries, cap = self.layer.grouped(queries, shape[1]), self.layer.cap
        places = range(asked.start - first, asked.stop - first)
        return Queries(queries, places, self.scale, self.sinks, asked.start, cap=cap)

    @property
    def queries(self) -> mx.array:
        """`(B, n_heads, n, head_dim)`: the queries recorded, in order of position."""
        return mx.concatenate(self._queries, axis=2)[:, :, -len(self.query_positions) :]

    @property
    def query_positions(self) -> range:
        return range(self._stop - int(min(self.n_queries, self.newest)), self._stop)

    @property
    def n_queries(self) -> int:
        return sum(q.shape[2] for q in self._queries)

    @property
    def recorded(self) -> list[mx.array]:
        """What is recorded, to be evaluated as the answer goes on."""
        return [*self._queries, *self.moments.sums]

    def inherit(self, recorder: Any) -> None:
        """Let another cache's queries vote, as those of the newest tokens, until others come."""
        if isinstance(recorder, Recorder):
            self._queries, self._stop = list(recorder._queries), self.offset
            self.scale, self.sinks = recorder.scale, recorder.sinks
            self.moments = self.moments.inherited_from(recorder.moments)
