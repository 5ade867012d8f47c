"""Entries that are read in part: the keys of a span, or what was chosen."""

from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..entries.selection import take_entries


class Source(Protocol):
    """A layer's entries, in order of position.

    Attributes:
        n_entries: entries held.
        waits: what is read takes memory of its own, so that it should be used before more is read.
    """

    @property
    def n_entries(self) -> int: ...

    @property
    def waits(self) -> bool: ...

    def read_keys(self, start: int, stop: int) -> mx.array:
        """The keys of `[start, stop)`, `(B, n_kv_heads, stop - start, head_dim)`."""

    def gather(self, places: mx.array) -> tuple[mx.array, mx.array]:
        """Keys and values `(B, n_kv_heads, n, head_dim)` at uint32 `places` `(B, n_kv_heads, n)`."""


class Plain:
    """The entries of a `KVCache`."""

    waits = False

    def __init__(self, cache: KVCache):
        self._cache: Any = cache

    @property
    def n_entries(self) -> int:
        return self._cache.offset

    def read_keys(self, start: int, stop: int) -> mx.array:
        return self._cache.keys[:, :, start:stop]

    def gather(self, places: mx.array) -> tuple[mx.array, mx.array]:
        return take_entries(self._cache.keys, places), take_entries(self._cache.values, places)
