"""Where a layer's entries are kept, and the store that holds them quantised in memory."""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from ..entries.entries import Entries
from ..entries.quantization import Parts, Quantization, each, join, n_bytes, n_rows, rows
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
    """Quantised entries, in memory.

    Each entry is quantised by itself, so that it does not matter in which portions they come.

    Attributes:
        keys, values: their parts, `(B, n_kv_heads, n_entries, ...)` each; None before the first.
    """

    waits = True

    def __init__(self, quantization: Quantization):
        self.quantization = quantization
        self.n_entries = 0
        self.keys: Parts | None = None
        self.values: Parts | None = None

    def append(self, keys: mx.array, values: mx.array) -> None:
        parts = []
        for held, new in ((self.keys, keys), (self.values, values)):
            packed = self.quantization.pack(new)
            parts.append(packed if held is None else join(held, packed))
            mx.eval(parts[-1])
        self.hold(*parts)

    def hold(self, keys: Parts, values: Parts) -> None:
        """Hold these parts instead of whatever there was."""
        self.keys, self.values = keys, values
        self.n_entries = n_rows(keys)

    def as_cache(self) -> QuantizedKVCache | None:
        if not self.n_entries:
            return None
        cache: Any = QuantizedKVCache(self.quantization.group_size, self.quantization.bits)
        cache.keys, cache.values, cache.offset = self.keys, self.values, self.n_entries
        return cache

    def take(self, entries: Entries) -> bool:
        if entries.quantization is None:
            return False
        self.quantization = entries.quantization
        self.hold(entries.stored_keys, entries.stored_values)
        return True

    def entries(self) -> tuple[mx.array, mx.array]:
        return self.quantization.unpack(self.keys), self.quantization.unpack(self.values)

    def read_keys(self, start: int, stop: int) -> mx.array:
        return self.quantization.unpack(rows(self.keys, start, stop))

    def gather(self, places: mx.array) -> tuple[mx.array, mx.array]:
        taken = each(lambda x: take_entries(x, places), (self.keys, self.values))
        keys, values = map(self.quantization.unpack, taken)
        return keys, values

    def truncate(self, n: int) -> None:
        if n < self.n_entries:
            first = each(mx.contiguous, rows((self.keys, self.values), 0, n))
            mx.eval(first)  # so that the others are not kept alive
            self.hold(*first)

    @property
    def nbytes(self) -> int:
        return n_bytes((self.keys, self.values)) if self.n_entries else 0

    @property
    def file_nbytes(self) -> int:
        return 0

    @property
    def entry_bytes(self) -> int:
        return n_bytes(rows(self.entries(), 0, 1)) if self.n_entries else 0  # nothing is computed
