"""Where a layer's entries are kept, and the store that holds them quantised in memory."""

from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from ..entries.entries import Entries
from ..entries.quantization import Quantization, each, n_bytes, rows
from ..entries.selection import take_entries
from .sources import Source


class Store(Source, Protocol):
    """A layer's entries, and where they are kept.

    Attributes:
        nbytes, file_nbytes: what they take in memory, and in a file.
        entry_bytes: what one token's keys and values take when they are read; 0 before the first.
    """

    @property
    def nbytes(self) -> int: ...

    @property
    def file_nbytes(self) -> int: ...

    @property
    def entry_bytes(self) -> int: ...

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Take `(B, n_kv_heads, n, head_dim)` keys and values behind those held.

        Raises:
            SnapKVError: there is no room for them; the store is then as it was.
        """

    def entries(self) -> tuple[mx.array, mx.array]:
        """All keys and values, `(B, n_kv_heads, n_entries, head_dim)`, of the dtype in which they came."""

    def as_cache(self) -> QuantizedKVCache | None:
        """mlx-lm's cache of the same entries, stored the same, if it has such and there are any."""

    def take(self, entries: Entries) -> bool:
        """Hold these entries, in place of none, unless they would not stay as they are; whether it does."""

    def truncate(self, n: int) -> None:
        """Hold the first `n` entries only."""


class QuantizedStore:
    """Quantised entries, in memory, in a cache of mlx-lm's.

    Each entry is quantised by itself, so that it does not matter in which portions they come.

    Attributes:
        quantization: how they are quantised.
    """

    waits = True

    def __init__(self, quantization: Quantization):
        self.hold(QuantizedKVCache(quantization.group_size, quantization.bits))

    def hold(self, cache: QuantizedKVCache) -> None:
        """Hold the entries of this cache, and go on in it."""
        self.quantization = Quantization(cache.bits, cache.group_size)
        self._cache: Any = cache

    @property
    def n_entries(self) -> int:
        return self._cache.offset

    def append(self, keys: mx.array, values: mx.array) -> None:
        self._cache.update_and_fetch(keys, values)
        mx.eval(self._cache.keys)
        mx.eval(self._cache.values)  # after the keys, for less memory at once

    def as_cache(self) -> QuantizedKVCache | None:
        return self._cache if self.n_entries else None

    def take(self, entries: Entries) -> bool:
        how = entries.quantization
        if how is None:
            return False
        cache: Any = QuantizedKVCache(how.group_size, how.bits)
        cache.keys, cache.values = entries.stored_keys, entries.stored_values
        cache.offset = len(entries)
        self.hold(cache)
        return True

    def entries(self) -> tuple[mx.array, mx.array]:
        keys, values = map(self.quantization.unpack, self._cache.keys_and_values())
        return keys, values

    def read_keys(self, start: int, stop: int) -> mx.array:
        return self.quantization.unpack(rows(self._cache.keys, start, stop))

    def gather(self, places: mx.array) -> tuple[mx.array, mx.array]:
        stored = self._cache.keys, self._cache.values
        keys, values = map(
            self.quantization.unpack, each(lambda x: take_entries(x, places), stored)
        )
        return keys, values

    def truncate(self, n: int) -> None:
        self._cache.trim(max(0, self.n_entries - n))

    @property
    def nbytes(self) -> int:
        return n_bytes(self._cache.keys_and_values()) if self.n_entries else 0

    @property
    def file_nbytes(self) -> int:
        return 0

    @property
    def entry_bytes(self) -> int:
        return n_bytes(rows(self.entries(), 0, 1)) if self.n_entries else 0  # nothing is computed
