"""Where a layer's entries are: one small interface, and the store that holds them in memory."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from ..entries.entries import Entries
from ..entries.quantization import (
    KEYS,
    VALUES,
    Quantization,
    Stored,
    arrays,
    grown,
    join,
    n_bytes,
    n_rows,
    rows,
    unpack,
    write,
)
from ..entries.selection import take_entries


class EntryView(ABC):
    """A layer's entries in order of position, to be read; keys and values are `(B, n_kv_heads, n, head_dim)`."""

    n_entries: int
    quantization: Quantization | None  # how they are stored, each by itself; None is as they came
    waits: bool = False  # what is read takes memory of its own: use it before more is read

    @abstractmethod
    def stored(self, which: int, start: int, stop: int) -> Stored:
        """The KEYS or VALUES of entries `[start, stop)`, as they are stored."""

    def read(self, which: int, start: int, stop: int) -> mx.array:
        return unpack(self.stored(which, start, stop), self.quantization)

    @abstractmethod
    def gather(self, places: mx.array) -> tuple[mx.array, ...]:
        """Keys and values at uint32 `places` `(B, n_kv_heads, n)`."""

    def entries(self, start: int = 0, stop: int | None = None) -> tuple[mx.array, mx.array]:
        """Keys and values of entries `[start, stop)`; by default of all."""
        stop = self.n_entries if stop is None else stop
        return self.read(KEYS, start, stop), self.read(VALUES, start, stop)


class Beginning(EntryView):
    """The first entries of a view."""

    def __init__(self, view: EntryView, n_entries: int):
        self._view, self.n_entries, self.waits = view, n_entries, view.waits

    def stored(self, which: int, start: int, stop: int) -> Stored:
        return self._view.stored(which, start, stop)

    def read(self, which: int, start: int, stop: int) -> mx.array:
        return self._view.read(which, start, stop)

    def gather(self, places: mx.array) -> tuple[mx.array, ...]:
        return self._view.gather(places)


class Store(EntryView):
    """Entries that more are appended to: in memory, quantised, or in a file."""

    cache: Any = None  # mlx-lm's cache that they are in, which may go on by itself
    in_files: bool = False  # whoever saves a cache puts its entries' files beside the file
    # Keys and values of the first of entries in files, `(B, n_kv_heads, 1, head_dim)`, which a saved cache has of them
    # to show the shapes; None if there are none.
    first_entry: tuple[mx.array, mx.array] | None = None
    nbytes: int  # what they take in memory, and below, in files
    file_nbytes: int = 0

    @abstractmethod
    def append(self, entries: Entries) -> None:
        """Add entries, as they are if quantised the same way. Raises: SnapKVError: no space; it is then as it was."""

    @abstractmethod
    def truncate(self, n: int) -> None:
        """Hold the first `n` entries only."""

    def reads(self, path: Path) -> bool:
        """Whether some of the entries are in the saved file of that name."""
        return False

    def held(self) -> Entries:
        """All entries, as they are stored."""
        keys, values = (self.stored(which, 0, self.n_entries) for which in (KEYS, VALUES))
        return Entries(keys, values, quantization=self.quantization)


class MemoryStore(Store):
    """Entries in one of mlx-lm's caches: in `cache`, or a new one that is quantised so."""

    def __init__(self, quantization: Quantization | None = None, cache: Any = None):
        if isinstance(cache, QuantizedKVCache):
            quantization = Quantization(cache.bits, cache.group_size)
        self.quantization = quantization
        self.waits = quantization is not None
        if cache is None and quantization is not None:
            cache = QuantizedKVCache(quantization.group_size, quantization.bits)
        self.cache = cache or KVCache()

    @property
    def n_entries(self) -> int:  # type: ignore[override]
        return self.cache.offset

    def append(self, entries: Entries) -> None:
        new, cache, n = entries.packed(self.quantization), self.cache, self.n_entries
        stored = new.stored_keys, new.stored_values
        if cache.keys is None or n + len(new) > n_rows(cache.keys):
            held = rows((cache.keys, cache.values) if n else stored, 0, n)
            # Growing copies everything, so it grows by a share of that.
            cache.keys, cache.values = grown(held, max(KVCache.step, len(new), n // 8))
        write((cache.keys, cache.values), n, stored)
        cache.offset += len(new)
        mx.eval(cache.keys)
        mx.eval(cache.values)  # after the keys, for less memory at once

    def truncate(self, n: int) -> None:
        self.cache.trim(max(0, self.n_entries - n))

    def stored(self, which: int, start: int, stop: int) -> Stored:
        return rows((self.cache.keys, self.cache.values)[which], start, stop)

    def gather(self, places: mx.array) -> tuple[mx.array, ...]:
        keys, values = arrays(self.cache.keys), arrays(self.cache.values)
        taken = take_entries([*keys, *values], places)
        parts = taken[: len(keys)], taken[len(keys) :]
        plain = self.quantization is None
        return tuple(unpack(x[0] if plain else tuple(x), self.quantization) for x in parts)

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return n_bytes(self.cache.keys_and_values()) if self.n_entries else 0


class JoinedView(EntryView):
    """The entries of several views, one behind the other."""

    def __init__(self, views: Sequence[EntryView]):
        self._parts: list[Any] = list(views)

    @property
    def n_entries(self) -> int:  # type: ignore[override]
        return sum(part.n_entries for part in self._parts)

    @property
    def waits(self) -> bool:  # type: ignore[override]
        return any(part.waits for part in self._parts)

    def _within(self, start: int, stop: int) -> Iterator[tuple[Any, int, int]]:
        """The views that have some of the entries `[start, stop)`, and which of their own those are."""
        first = 0
        for part in self._parts:
            a, b = max(start - first, 0), min(stop - first, part.n_entries)
            if a < b:
                yield part, a, b
            first += part.n_entries

    def stored(self, which: int, start: int, stop: int) -> Stored:
        """Of views that store entries alike."""
        return join(*(part.stored(which, a, b) for part, a, b in self._within(start, stop)))

    def read(self, which: int, start: int, stop: int) -> mx.array:
        return join(*(part.read(which, a, b) for part, a, b in self._within(start, stop)))

    def gather(self, places: mx.array) -> tuple[mx.array, ...]:
        if len(self._parts) == 1:
            return self._parts[0].gather(places)
        found: Any = ()
        first = 0
        for part, _, n in self._within(0, self.n_entries):
            there = part.gather(mx.clip(places, first, first + n - 1) - first)
            here = (places >= first)[..., None]
            found = tuple(mx.where(here, *pair) for pair in zip(there, found)) if found else there
            first += n
        return found
