"""Caches as they are in the middle of a prompt, without reading what comes before."""

from __future__ import annotations

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


def at_position(model: Any, caches: list, position: int, chunk: int) -> list:
    """The caches of a prompt of which `position` tokens have been read, so many at a time.

    A few chunks are read, until nothing changes but how far the prompt has come; then that is changed. Nothing is
    computed: all arrays are blank.
    """
    now = [blanked(cache) for cache in caches]
    n_read = 0
    steady = max((_steady_after(cache, position, chunk) for cache in members(now)), default=chunk)
    while n_read < min(position, steady):
        n = min(chunk, position - n_read)
        model(blank((1, n), mx.int32), cache=now)
        now = [blanked(cache) for cache in now]
        n_read += n
    if n_read < position:
        for cache in members(now):
            _move(cache, position, chunk)
    return now


def _steady_after(cache: Any, position: int, chunk: int) -> int:
    """Tokens after which reading more does not change what a cache is like, up to `position`."""
    if isinstance(cache, BlockKVCache) and cache.capacity <= position:
        return cache.capacity + 2 * chunk
    if isinstance(cache, ChunkedKVCache):
        return cache.chunk_size + 2 * chunk
    return chunk


def _move(cache: Any, position: int, chunk: int) -> None:
    """Let a cache that has read some chunks have read up to `position`."""
    if isinstance(cache, ArraysCache):
        return
    if isinstance(cache, ChunkedKVCache):
        cache.start_position += position - cache.offset
    elif isinstance(cache, RotatingKVCache):
        cache._idx = min(position, cache.max_size - 1 + chunk)
        _resize(cache, cache._idx)
    elif isinstance(cache, BlockKVCache):
        if cache.capacity > position:
            cache._n = position
            _resize(cache, max(n_rows(cache.keys), position))
            if cache._received is not None:
                B, H, _ = cache._received.shape
                cache._received = blank((B, H, position), cache._received.dtype)
    elif isinstance(cache, (KVCache, QuantizedKVCache)):
        _resize(cache, grown_rows(position, chunk, cache.step))
    if isinstance(cache, Recorder):
        _move_queries(cache, position - cache.offset)
    if hasattr(cache, "offset"):
        cache.offset = position


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
