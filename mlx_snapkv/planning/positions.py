"""Caches as they are in the middle of a prompt, without reading what comes before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from ..caches.block import BlockKVCache
from ..caches.layers import members
from ..entries.quantization import each, n_rows
from ..entries.queries import Recorder
from ..policies.budgets import UNLIMITED
from .blanks import blank, blanked


class Positions:
    """A prompt's caches, wherever it has come.

    A few chunks are read, until nothing changes but how far the prompt has come; then that is changed. Nothing is
    computed: all arrays are blank.

    Args:
        caches: those that it is read with, still empty.
        chunk: tokens read at a time.
    """

    def __init__(self, model: Any, caches: list, chunk: int):
        self._model, self.chunk = model, chunk
        self._known = {0: caches}  # by the number of whole chunks read

    def at(self, position: int) -> list:
        """The caches when `position` tokens have been read."""
        whole, rest = divmod(position, self.chunk)
        now = self._after(whole)
        if whole:
            return self._moved(now, position) if rest else [blanked(cache) for cache in now]
        return self._read(now, rest) if rest else [blanked(cache) for cache in now]

    def late(self, start: int, n: int, short: int) -> list:
        """The caches when all but the last `short` of the `n` tokens from `start` on have been read.

        Where reading the `n` evicts entries, reading the last ones does, and leaves as many in the end.
        """
        if short == n:
            return self.at(start)
        now = self.at(start + n - short)
        for cache, before in zip(members(now), members(self.at(start))):
            if isinstance(cache, BlockKVCache) and before._n and before._must_evict(n):
                most = cache.quota.entries + n
                _hold(cache, min(most, n_rows(cache.keys)))
                cache.quota = replace(cache.quota, entries=most - short)
                cache.block = short
        return now

    def _after(self, whole: int) -> list:
        """The caches after so many whole chunks, the first, and those in which something new happens, really read."""
        if whole not in self._known:
            full, steady, cycle = self._changes()
            if 1 < whole <= full:
                self._known[whole] = self._moved(self._after(1), whole * self.chunk)
            elif whole > steady:
                alike = steady - (steady - whole) % cycle
                return self._moved(self._after(alike), whole * self.chunk)
            else:
                self._known[whole] = self._read(self._after(whole - 1), self.chunk)
        return self._known[whole]

    def _changes(self) -> tuple[int, int, int]:
        """Chunks until the first cache is full, until all have been for a while, and from eviction to eviction."""
        full, steady, cycle = [], [1], 1
        for cache in members(self._known[0]):
            if isinstance(cache, BlockKVCache) and cache.capacity < UNLIMITED:
                cycle = max(1, cache.block // self.chunk)
                full.append(cache.capacity // self.chunk)
                steady.append(full[-1] + 1 + cycle)
            elif isinstance(cache, ChunkedKVCache):
                full.append(1)
                steady.append(cache.chunk_size // self.chunk + 2)
        return max(1, min(full, default=1)), max(steady), cycle

    def _read(self, caches: list, n: int) -> list:
        now = [blanked(cache) for cache in caches]
        self._model(blank((1, n), mx.int32), cache=now)
        return [blanked(cache) for cache in now]

    def _moved(self, caches: list, position: int) -> list:
        now = [blanked(cache) for cache in caches]
        for cache in members(now):
            _move(cache, position, self.chunk)
        return now


def _move(cache: Any, position: int, chunk: int) -> None:
    """Let a cache that has read some chunks have read up to `position`."""
    if isinstance(cache, ArraysCache) or cache.empty():
        return
    if isinstance(cache, ChunkedKVCache):
        cache.start_position += position - cache.offset
    elif isinstance(cache, RotatingKVCache):
        cache._idx = min(position, cache.max_size - 1 + chunk)
        _resize(cache, cache._idx)
    elif isinstance(cache, BlockKVCache):
        if cache.capacity >= position:
            _resize(cache, max(n_rows(cache.keys), position))
            _hold(cache, position)
    elif isinstance(cache, (KVCache, QuantizedKVCache)):
        _resize(cache, grown_rows(position, chunk, cache.step))
    if isinstance(cache, Recorder):
        _move_queries(cache, position - cache.offset)
    if hasattr(cache, "offset"):
        cache.offset = position


def _hold(cache: BlockKVCache, n: int) -> None:
    """Let a cache hold `n` entries, for which it has room."""
    cache._n = n
    if cache._received is not None:
        B, H, _ = cache._received.shape
        cache._received = blank((B, H, n), cache._received.dtype)


def _move_queries(cache: Recorder, n: int) -> None:
    """Let the queries that a cache has kept, or counted, be those of `n` tokens later."""
    if cache._stop:
        cache._stop += n
    if cache._counted_to:
        cache._counted_to += n


def grown_rows(position: int, chunk: int, step: int = KVCache.step) -> int:
    """Rows that a full cache has grown to, `step` at a time."""
    rows, n = 0, 0
    while n < position:
        more = min(chunk, position - n)
        if n + more > rows:
            rows = (n if n % step else rows) + -(-more // step) * step
        n += more
    return rows


def _resize(cache: Any, rows: int) -> None:
    def sized(x: mx.array) -> mx.array:
        return blank((*x.shape[:2], rows, *x.shape[3:]), x.dtype)

    cache.keys, cache.values = each(sized, cache.keys), each(sized, cache.values)
