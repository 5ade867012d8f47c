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
        self._after = [caches]  # by the number of chunks read

    def at(self, position: int) -> list:
        """The caches when `position` tokens have been read."""
        whole = self._whole_chunks(position)
        now = [blanked(cache) for cache in self._after[whole]]
        if 0 < position < self.chunk:
            self._read(now, position)
            return [blanked(cache) for cache in now]
        if position > whole * self.chunk:
            for cache in members(now):
                _move(cache, position, self.chunk)
        return now

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

    def _whole_chunks(self, position: int) -> int:
        """Chunks to read before the rest of the way is only counted."""
        found = 0
        while (found + 1) * self.chunk <= position:
            now = self._after[found]
            steady = max(_steady_after(cache, position, self.chunk) for cache in members(now))
            if found * self.chunk >= steady:
                break
            found += 1
            if found == len(self._after):
                now = [blanked(cache) for cache in now]
                self._read(now, self.chunk)
                self._after.append([blanked(cache) for cache in now])
        return found

    def _read(self, caches: list, n: int) -> None:
        self._model(blank((1, n), mx.int32), cache=caches)


def _steady_after(cache: Any, position: int, chunk: int) -> int:
    """Tokens after which reading more does not change what a cache is like, up to `position`."""
    if isinstance(cache, BlockKVCache) and cache.capacity <= position:
        return cache.capacity + 2 * chunk
    if isinstance(cache, ChunkedKVCache):
        return cache.chunk_size + 2 * chunk
    return chunk


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
        if cache.capacity > position:
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
