"""Entries that are read in part: the keys of a span, or what was chosen."""

from collections.abc import Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

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


S = TypeVar("S", bound=Source)


class Chain(Generic[S]):
    """The entries of one source after the other."""

    def __init__(self, sources: list[S]):
        self._sources = sources

    @property
    def n_entries(self) -> int:
        return sum(source.n_entries for source in self._sources)

    @property
    def waits(self) -> bool:
        return any(source.waits for source in self._sources)

    def _spans(self) -> Iterator[tuple[S, int, int]]:
        """Those that hold any, and where in all entries theirs begin and end."""
        first = 0
        for source in self._sources:
            stop = first + source.n_entries
            if first < stop:
                yield source, first, stop
            first = stop

    def _within(self, start: int, stop: int) -> Iterator[tuple[S, int, int]]:
        """Those that have some of the entries `[start, stop)`, and which of their own those are."""
        for source, first, end in self._spans():
            a, b = max(start, first) - first, min(stop, end) - first
            if a < b:
                yield source, a, b

    def read_keys(self, start: int, stop: int) -> mx.array:
        return joined([source.read_keys(a, b) for source, a, b in self._within(start, stop)])

    def gather(self, places: mx.array) -> tuple[mx.array, mx.array]:
        found: Any = ()
        for source, first, stop in self._spans():
            part = source.gather(mx.clip(places, first, stop - 1) - first)
            here = (places >= first)[..., None]
            found = tuple(mx.where(here, *pair) for pair in zip(part, found)) if found else part
        return found


def joined(parts: Sequence[mx.array]) -> mx.array:
    """Arrays `(B, n_kv_heads, n, ...)` of entries, one behind the other."""
    return mx.concatenate(list(parts), axis=2)


class First:
    """The first `n_entries` of a source."""

    def __init__(self, source: Source, n_entries: int):
        self.n_entries = n_entries
        self.waits = source.waits
        self.read_keys, self.gather = source.read_keys, source.gather
