"""Stores that keep entries in memory, either plain or quantised to 8 bits."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from ...caches.adapter import layer_cache
from ...entries.entries import Entries
from ...entries.quantization import (
    Quantization,
    Stored,
    count_bytes,
    count_rows,
    flat_arrays,
    map_arrays,
    slice_rows,
    unpack,
    with_new_rows,
    write_rows,
)
from .base import Store


def rows_to_grow_by(n: int) -> int:
    """Return the minimum number of rows by which the buffers of `n` entries grow.

    Reallocation copies all entries, so buffers grow by at least an eighth.
    """
    return max(KVCache.step, n // 8)


class MemoryStore(Store):
    """Entries in an mlx-lm cache.

    Args:
        quantization: quantisation of a new cache, or None for plain entries.
        cache: an existing `KVCache` or `QuantizedKVCache` to use. None creates a new one.
    """

    name = "memory"

    def __init__(self, quantization: Quantization | None = None, cache: Any = None):
        """Use the given cache, or create an empty one."""
        if isinstance(cache, QuantizedKVCache):
            quantization = Quantization(cache.bits, cache.group_size)
        self.quantization = quantization
        self.reads_allocate = quantization is not None
        if cache is None and quantization is not None:
            cache = QuantizedKVCache(quantization.group_size, quantization.bits)
        self.cache = cache or KVCache()

    @property
    def n_entries(self) -> int:  # type: ignore[override]
        """Return the number of entries in the cache."""
        return self.cache.offset

    @property
    def buffers(self) -> tuple[mx.array, mx.array] | None:
        """Return the cache's buffers, or None if they are quantised or the cache is empty."""
        if self.quantization is not None or self.n_entries == 0:
            return None
        return self.cache.keys, self.cache.values

    def append(self, entries: Entries) -> None:
        """Append entries to the cache's buffers, with the store's quantisation."""
        new_entries = entries.with_quantization(self.quantization)
        new_rows = new_entries.stored_keys, new_entries.stored_values
        n_new = len(new_entries)
        n_before = self.n_entries
        cache = self.cache
        must_reallocate = cache.keys is None or n_before + n_new > count_rows(cache.keys)
        if must_reallocate:
            buffers = (cache.keys, cache.values) if n_before else new_rows
            earlier_rows = slice_rows(buffers, 0, n_before)
            n_added = max(n_new, rows_to_grow_by(n_before))
            cache.keys, cache.values = with_new_rows(earlier_rows, n_added)
        write_rows((cache.keys, cache.values), n_before, new_rows)
        cache.offset += n_new
        mx.eval(cache.keys)
        mx.eval(cache.values)  # after the keys, to limit memory

    def truncate(self, n: int) -> None:
        """Drop all but the first `n` entries. The buffers keep their size."""
        self.cache.trim(max(0, self.n_entries - n))

    def all_entries(self) -> Entries:
        """Return all entries as stored."""
        return layer_cache(self.cache).held()

    def read(self, which: int, start: int, stop: int) -> mx.array:
        """Return the dequantised KEYS or VALUES of entries `[start, stop)`."""
        buffer = (self.cache.keys, self.cache.values)[which]
        return unpack(slice_rows(buffer, start, stop), self.quantization)

    def gather(self, positions: mx.array) -> tuple[mx.array, ...]:
        """Return the dequantised keys and values at uint32 `positions` `(B, n_kv_heads, n)`."""
        # One call for keys and values computes the row numbers only once.
        keys, values = _take_entries((self.cache.keys, self.cache.values), positions)
        return unpack(keys, self.quantization), unpack(values, self.quantization)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Return the size of all entries in bytes, not counting unused rows."""
        if self.n_entries == 0:
            return 0
        return count_bytes(self.cache.keys_and_values())


def _take_entries(buffers: Stored, positions: mx.array) -> Stored:
    """Return the keys and values at `positions` `(B, n_kv_heads, n)`, plain or quantised.

    Buffers `(B, n_kv_heads, T, ...)` should be contiguous, or MLX will copy them.
    """
    first_buffer, *_ = flat_arrays(buffers)
    B, H, T, _ = first_buffer.shape
    # Taking from a flat array is 2 to 6 times faster than `take_along_axis`.
    starts = mx.arange(0, B * H * T, T, dtype=mx.uint32).reshape(B, H, 1)
    row_numbers = (positions + starts).flatten()

    def take_rows(buffer: mx.array) -> mx.array:
        rows = mx.take(mx.flatten(buffer, 0, 2), row_numbers, axis=0)
        return mx.unflatten(rows, 0, (B, H, -1))

    return map_arrays(take_rows, buffers)


class EightBitStore(MemoryStore):
    """Entries in memory, quantised to 8 bits."""

    name, bits = "8bit", 8
