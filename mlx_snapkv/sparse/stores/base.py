"""The base classes of stores, which keep a layer's entries, and the registry of stores."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx

from ...entries.entries import Entries
from ...entries.quantization import KEYS, VALUES, Quantization, Stored, join, unpack
from ..growing_rows import MakeSpill

STORES: dict[str, type["Store"]] = {}  # value of the option `store` -> class


class EntryView(ABC):
    """A read-only view of a layer's entries, by position. Keys and values are `(B, n_kv_heads, n, head_dim)`."""

    n_entries: int
    quantization: Quantization | None  # quantisation of the entries; None if they are plain
    # Whether `read` allocates memory; if so, use each result before reading the next.
    reads_allocate: bool = False
    make_spill: MakeSpill | None = None  # creates a spill file; None if the entries are in memory

    @property
    def buffers(self) -> tuple[mx.array, mx.array] | None:
        """Return the whole buffers `(B, n_kv_heads, capacity, head_dim)`; None unless plain and in memory."""
        return None

    @abstractmethod
    def stored(self, which: int, start: int, stop: int) -> Stored:
        """Return the KEYS or VALUES of entries `[start, stop)` as they are stored, quantised or plain."""

    @abstractmethod
    def gather(self, positions: mx.array) -> tuple[mx.array, ...]:
        """Return the keys and values at uint32 `positions` `(B, n_kv_heads, n)`."""

    def read(self, which: int, start: int, stop: int) -> mx.array:
        """Return the KEYS or VALUES of entries `[start, stop)`, dequantised."""
        return unpack(self.stored(which, start, stop), self.quantization)

    def entries(self, start: int = 0, stop: int | None = None) -> tuple[mx.array, mx.array]:
        """Return the keys and values of entries `[start, stop)`, dequantised. The default is all entries."""
        stop = self.n_entries if stop is None else stop
        return self.read(KEYS, start, stop), self.read(VALUES, start, stop)


class Store(EntryView):
    """The entries of a layer, which can be appended and truncated.

    A subclass with a `name` is registered: the option `store=NAME` then makes one such store for each layer.
    """

    name: ClassVar[str]
    bits: ClassVar[int | None] = None  # bits per number; None if entries are plain
    in_files: bool = False  # whether entries are in files, which a saved cache keeps in a folder
    folder: str | None = None  # folder of new files; None is TMPDIR
    cache: Any = None  # mlx-lm's cache that holds the entries, if they are in memory
    # Keys and values `(B, n_kv_heads, 1, head_dim)` of the first entry, if entries are in files. Saved caches take
    # their shapes from it.
    first_entry: tuple[mx.array, mx.array] | None = None
    nbytes: int  # bytes in memory
    file_nbytes: int = 0  # bytes in files

    @abstractmethod
    def __init__(self, quantization: Quantization | None = None):
        """Create an empty store that quantises entries by `quantization`; None keeps them plain."""

    def __init_subclass__(cls) -> None:
        """Register the class if it defines a `name`."""
        if "name" in vars(cls):
            STORES[cls.name] = cls

    @abstractmethod
    def append(self, entries: Entries) -> None:
        """Append entries. Raises: SnapKVError: the disk is full; the store is then unchanged."""

    @abstractmethod
    def truncate(self, n: int) -> None:
        """Keep the first `n` entries, and drop the others."""

    def reads(self, path: Path) -> bool:
        """Return whether the store reads the saved file at `path`."""
        return False

    def all_entries(self) -> Entries:
        """Return all entries without dequantising them."""
        keys, values = (self.stored(which, 0, self.n_entries) for which in (KEYS, VALUES))
        return Entries(keys, values, quantization=self.quantization)


class JoinedView(EntryView):
    """Several views of successive entries, read as one.

    Attributes:
        limit: number of entries that this view includes; None includes all.
    """

    limit: int | None = None

    def __init__(self, views: Sequence[EntryView]):
        """Join views, which are in order of position."""
        self._parts: list[Any] = list(views)

    @property
    def n_entries(self) -> int:  # type: ignore[override]
        """Return the number of entries in this view."""
        n = sum(part.n_entries for part in self._parts)
        return n if self.limit is None else min(n, self.limit)

    @property
    def reads_allocate(self) -> bool:  # type: ignore[override]
        """Return whether reading any of the views allocates memory."""
        return any(part.reads_allocate for part in self._parts)

    @property
    def make_spill(self) -> MakeSpill | None:  # type: ignore[override]
        """Return the function that creates spill files for the first view that has one; None if all are in memory."""
        return next((part.make_spill for part in self._parts if part.make_spill is not None), None)

    @property
    def buffers(self) -> tuple[mx.array, mx.array] | None:
        """Return the buffers of the view; None if it joins several views, or if entries are not plain and in memory."""
        return self._parts[0].buffers if len(self._parts) == 1 else None

    def _within(self, start: int, stop: int) -> Iterator[tuple[Any, int, int]]:
        """Yield each view that overlaps the entries `[start, stop)`, with the overlap's start and stop in that view."""
        first = 0
        for part in self._parts:
            a, b = max(start - first, 0), min(stop - first, part.n_entries)
            if a < b:
                yield part, a, b
            first += part.n_entries

    def stored(self, which: int, start: int, stop: int) -> Stored:
        """Return the KEYS or VALUES of entries `[start, stop)` as stored. All views must use one quantisation."""
        return join(*(part.stored(which, a, b) for part, a, b in self._within(start, stop)))

    def read(self, which: int, start: int, stop: int) -> mx.array:
        """Return the KEYS or VALUES of entries `[start, stop)`, dequantised and joined."""
        return join(*(part.read(which, a, b) for part, a, b in self._within(start, stop)))

    def gather(self, positions: mx.array) -> tuple[mx.array, ...]:
        """Return the keys and values at uint32 `positions` `(B, n_kv_heads, n)`, gathered from all views."""
        gathered: Any = ()
        first = 0
        for part, _, n in self._within(0, self.n_entries):
            if n == self.n_entries:
                return part.gather(positions)
            # Clip positions that belong to other views. Their entries are placeholders, which are replaced below.
            entries = part.gather(mx.clip(positions, first, first + n - 1) - first)
            if gathered:
                from_part = (positions >= first)[..., None]
                entries = tuple(mx.where(from_part, *pair) for pair in zip(entries, gathered))
            gathered = entries
            first += n
        return gathered
