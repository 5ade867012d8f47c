"""Where a layer's entries are kept, and the store that holds them quantised in memory."""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import QuantizedKVCache

from ..entries.quantization import Parts, Quantization, each, join, n_bytes, n_rows


class Store(Protocol):
    """A layer's entries, in order of position.

    Attributes:
        n_entries: entries held.
        nbytes, file_nbytes: what they take in memory, and in a file.
        entry_bytes: what one token's keys and values take when they are read; 0 before the first.
        eager: `entries` reads at once, not when what it gives is computed.
    """

    n_entries: int
    eager: bool

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

    def truncate(self, n: int) -> None:
        """Hold the first `n` entries only."""


class QuantizedStore:
    """Entries of fewer bits, in memory.

    Each entry is quantised by itself, so that it does not matter in which portions they come.

    Attributes:
        keys, values: their parts, `(B, n_kv_heads, n_entries, ...)` each; None before the first.
    """

    eager = False

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

    @classmethod
    def of(cls, cache: QuantizedKVCache) -> QuantizedStore:
        """A store of a quantised cache's entries, with its bits and groups."""
        store = cls(Quantization(cache.bits, cache.group_size))
        store.hold(*(tuple(parts) for parts in cache.keys_and_values()))  # type: ignore[misc]
        return store

    def as_cache(self) -> QuantizedKVCache:
        """mlx-lm's cache of the same entries."""
        cache: Any = QuantizedKVCache(self.quantization.group_size, self.quantization.bits)
        cache.keys, cache.values, cache.offset = self.keys, self.values, self.n_entries
        return cache

    def entries(self) -> tuple[mx.array, mx.array]:
        return self.quantization.unpack(self.keys), self.quantization.unpack(self.values)

    def truncate(self, n: int) -> None:
        if n < self.n_entries and self.keys is not None and self.values is not None:
            first = [
                each(lambda x: mx.contiguous(x[:, :, :n]), parts)
                for parts in (self.keys, self.values)
            ]
            mx.eval(first)  # so that the others are not kept alive
            self.hold(*first)

    @property
    def nbytes(self) -> int:
        return n_bytes((*(self.keys or ()), *(self.values or ())))

    @property
    def file_nbytes(self) -> int:
        return 0

    @property
    def entry_bytes(self) -> int:
        if self.n_entries == 0:
            return 0
        return sum(x[:, :, :1].nbytes for x in self.entries())  # nothing is computed
