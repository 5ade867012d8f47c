"""Caches that keep the queries of their own tokens, for the votes."""

from __future__ import annotations

import math

import mlx.core as mx


class Recorder:
    """What a KV cache needs to keep queries: mixed into one with an `offset`.

    Args:
        first, last: logical positions whose queries are wanted, however they are cut into chunks.
        newest: how many of those are wanted at most, the latest ones; None is all.
    """

    offset: int

    def __init__(self, first: float = 0, last: float = math.inf, newest: int | None = None):
        super().__init__()
        self.start_recording(first, last, newest)

    def start_recording(
        self, first: float = 0, last: float = math.inf, newest: int | None = None
    ) -> None:
        """Want these positions, and forget the queries kept so far."""
        self.first = first
        self.last = last
        self.newest = newest
        self.scale = math.nan  # this and the sinks are told with the queries
        self.sinks: mx.array | None = None
        self._queries: list[mx.array] = []
        self._stop = 0  # the position after the last query's

    def record(self, queries: mx.array, scale: float, sinks: mx.array | None = None) -> None:
        """Take what is wanted of a call's queries `(B, n_heads, L, head_dim)`; its rows are already stored."""
        self.scale, self.sinks = scale, sinks
        start = self.offset - queries.shape[2]
        a, b = max(self.first, start), min(self.last, self.offset)
        if self.newest is not None:
            a = max(a, b - self.newest)
        if a >= b:
            return
        if start < self._stop:  # tokens were taken back meanwhile
            self._forget_from(start)
        elif a > self._stop:
            self._queries = []
        # A slice would keep the whole chunk alive.
        self._queries.append(mx.contiguous(queries[:, :, int(a) - start : int(b) - start]))
        self._stop = int(b)
        if self.newest is not None:
            while self.n_queries - self._queries[0].shape[2] >= self.newest:
                self._queries.pop(0)

    @property
    def queries(self) -> mx.array:
        """`(B, n_heads, n, head_dim)`: the queries wanted, in order of position."""
        queries = mx.concatenate(self._queries, axis=2)
        return queries if self.newest is None else queries[:, :, -self.newest :]

    @property
    def query_positions(self) -> range:
        """The logical positions of `queries`."""
        n = self.n_queries if self.newest is None else min(self.n_queries, self.newest)
        return range(self._stop - n, self._stop)

    @property
    def n_queries(self) -> int:
        return sum(q.shape[2] for q in self._queries)

    def _forget_from(self, position: int) -> None:
        kept = self.n_queries - max(0, self._stop - position)
        queries = mx.concatenate(self._queries, axis=2)[:, :, : max(0, kept)]
        self._queries = [mx.contiguous(queries)] if kept > 0 else []
        self._stop = position
