"""Where a layer's entries are kept, and the stores that hold them in memory."""

from abc import ABC, abstractmethod
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from ..entries.entries import Entries
from ..entries.quantization import Quantization, Stored, each, n_bytes, rows
from ..entries.selection import take_entries
from .row_bytes import RowBytes
from .sources import Plain, Source


class Store(Source, Protocol):
    """A layer's entries, and where they are kept.

    Attributes:
        quantization: how they are stored.
        nbytes, file_nbytes: what they take in memory, and in a file.
        entry_bytes: what one token's keys and values take when they are read; 0 before the first.
        layouts: how keys and values lie in files; empty before the first.
    """

    @property
    def quantization(self) -> Quantization | None: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def file_nbytes(self) -> int: ...

    @property
    def entry_bytes(self) -> int: ...

    @property
    def layouts(self) -> list[RowBytes]: ...

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Take `(B, n_kv_heads, n, head_dim)` keys and values behind those held.

        Raises:
            SnapKVError: there was no room for those of the last time; the store is then as it was before.
        """

    def flush(self) -> None:
        """Wait until what was appended is where it is kept. Raises as `append` does."""

    def entries(self) -> tuple[mx.array, mx.array]:
        """All keys and values, `(B, n_kv_heads, n_entries, head_dim)`, of the dtype in which they came."""

    def as_cache(self) -> KVCache | QuantizedKVCache | None:
        """mlx-lm's cache of the same entries, stored the same, if it has such and there are any."""

    def take(self, entries: Entries) -> bool:
        """Hold these entries, in place of none, unless they would not stay as they are; whether it does."""

    def truncate(self, n: int) -> None:
        """Hold the first `n` entries only."""

    def data(self, start: int, stop: int) -> list[np.ndarray]:
        """Keys and values of `[start, stop)` as `layouts` has them, uint8 `(stop - start, B, n_kv_heads, row)`."""


class _InMemory(ABC):
    """What stores have in common that keep their entries in a cache of mlx-lm's."""

    file_nbytes = 0
    _cache: Any

    @abstractmethod
    def entries(self) -> tuple[mx.array, mx.array]: ...

    @property
    def n_entries(self) -> int:
        return self._cache.offset

    def flush(self) -> None:
        return  # what was appended is there already

    def as_cache(self) -> Any:
        return self._cache if self.n_entries else None

    def truncate(self, n: int) -> None:
        self._cache.trim(max(0, self.n_entries - n))

    @property
    def nbytes(self) -> int:
        return n_bytes(self._cache.keys_and_values()) if self.n_entries else 0

    @property
    def entry_bytes(self) -> int:
        return n_bytes(rows(self.entries(), 0, 1)) if self.n_entries else 0  # nothing is computed


class PlainStore(_InMemory, Plain):
    """Entries as they come, in memory, in a cache of mlx-lm's."""

    quantization = None

    def __init__(self) -> None:
        super().__init__(KVCache())

    def append(self, keys: mx.array, values: mx.array) -> None:
        # Growing copies all there is, so it grows by a share of that.
        self._cache.step = max(KVCache.step, keys.shape[2], self.n_entries // 4)
        _append(self._cache, keys, values)

    def take(self, entries: Entries) -> bool:
        self.append(*entries.plain())
        return True

    def entries(self) -> tuple[mx.array, mx.array]:
        keys, values = self._cache.keys_and_values()
        return keys, values

    @property
    def layouts(self) -> list[RowBytes]:
        return [RowBytes.of(x, None) for x in self.entries()] if self.n_entries else []

    def data(self, start: int, stop: int) -> list[np.ndarray]:
        return _data(self, rows(self.entries(), start, stop))


class QuantizedStore(_InMemory):
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

    def append(self, keys: mx.array, values: mx.array) -> None:
        _append(self._cache, keys, values)

    def take(self, entries: Entries) -> bool:
        if entries.quantization is None:
            return False
        self.hold(quantized_cache(entries))
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

    @property
    def layouts(self) -> list[RowBytes]:
        if not self.n_entries:
            return []
        one = rows((self._cache.keys, self._cache.values), 0, 1)
        return [RowBytes.of(self.quantization.unpack(x), self.quantization) for x in one]

    def data(self, start: int, stop: int) -> list[np.ndarray]:
        return _data(self, rows((self._cache.keys, self._cache.values), start, stop))


def quantized_cache(entries: Entries) -> QuantizedKVCache:
    """mlx-lm's cache of entries that are quantised."""
    how: Any = entries.quantization
    cache: Any = QuantizedKVCache(how.group_size, how.bits)
    cache.keys, cache.values = entries.stored_keys, entries.stored_values
    cache.offset = len(entries)
    return cache


def stored_entries(store: Store) -> Entries:
    """All of a store's entries, stored as they are there."""
    data = store.data(0, store.n_entries)
    keys, values = (
        layout.stored(rows.transpose(1, 2, 0, 3)) for layout, rows in zip(store.layouts, data)
    )
    return Entries(keys, values, quantization=store.quantization)


def _data(store: Store, stored: Stored) -> list[np.ndarray]:
    return [np.array(layout.laid_out(x)) for layout, x in zip(store.layouts, stored)]


def _append(cache: Any, keys: mx.array, values: mx.array) -> None:
    cache.update_and_fetch(keys, values)
    mx.eval(cache.keys)
    mx.eval(cache.values)  # after the keys, for less memory at once
