"""Stores that keep entries in memory, either plain or quantised to 8 or 4 bits."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from ...entries.entries import Entries
from ...entries.quantization import (
    Quantization,
    Stored,
    count_bytes,
    count_rows,
    flat_arrays,
    slice_rows,
    unpack,
    with_new_rows,
    write_rows,
)
from ..selection import take_entries
from .base import Store


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
        """Return the cache's buffers, or None if they are quantised or not allocated yet."""
        is_plain = self.quantization is None and self.n_entries > 0
        return (self.cache.keys, self.cache.values) if is_plain else None

    def append(self, entries: Entries) -> None:
        """Append entries to the cache's buffers, quantised like the store."""
        new = entries.with_quantization(self.quantization)
        cache = self.cache
        n = self.n_entries
        stored = new.stored_keys, new.stored_values
        if cache.keys is None or n + len(new) > count_rows(cache.keys):
            before = slice_rows((cache.keys, cache.values) if n else stored, 0, n)
            # Reallocation copies all entries, so buffers grow by at least an eighth.
            cache.keys, cache.values = with_new_rows(before, max(KVCache.step, len(new), n // 8))
        write_rows((cache.keys, cache.values), n, stored)
        cache.offset += len(new)
        mx.eval(cache.keys)
        mx.eval(cache.values)  # after the keys, to limit memory

    def truncate(self, n: int) -> None:
        """Drop all but the first `n` entries. The buffers keep their size."""
        self.cache.trim(max(0, self.n_entries - n))

    def stored(self, which: int, start: int, stop: int) -> Stored:
        """Return the stored KEYS or VALUES of entries `[start, stop)`."""
        return slice_rows((self.cache.keys, self.cache.values)[which], start, stop)

    def gather(self, positions: mx.array) -> tuple[mx.array, ...]:
        """Return the dequantised keys and values at uint32 `positions` `(B, n_kv_heads, n)`."""
        keys, values = flat_arrays(self.cache.keys), flat_arrays(self.cache.values)
        taken = take_entries((*keys, *values), positions)
        parts = taken[: len(keys)], taken[len(keys) :]
        plain = self.quantization is None
        return tuple(unpack(x[0] if plain else tuple(x), self.quantization) for x in parts)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Return the size of all entries in bytes, not counting unused rows."""
        return count_bytes(self.cache.keys_and_values()) if self.n_entries else 0


class EightBitStore(MemoryStore):
    """Entries in memory, quantised to 8 bits."""

    name, bits = "8bit", 8


class FourBitStore(MemoryStore):
    """Entries in memory, quantised to 4 bits."""

    name, bits = "4bit", 4
