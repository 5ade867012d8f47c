"""Base classes for stores, which keep a layer's entries, and the registry of stores."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx

from ...entries.entries import Entries
from ...entries.quantization import KEYS, VALUES, Quantization, Stored, concatenate_rows, unpack
from ..growing_rows import MakeSpill

STORES: dict[str, type["Store"]] = {}  # value of the `store` option -> class


class EntryView(ABC):
    """A read-only view of a layer's entries, by position. Keys and values are `(B, n_kv_heads, n, head_dim)`."""

    n_entries: int
    quantization: Quantization | None  # None if the entries are plain
    # Whether `read` allocates memory. If it does, evaluate each result before reading the next.
    reads_allocate: bool = False
    make_spill: MakeSpill | None = None  # creates a spill file, if the entries are in files

    @property
    def buffers(self) -> tuple[mx.array, mx.array] | None:
        """Return the whole buffers `(B, n_kv_heads, capacity, head_dim)`, or None unless plain and in memory."""
        return None

    @abstractmethod
    def stored(self, which: int, start: int, stop: int) -> Stored:
        """Return the stored KEYS or VALUES of entries `[start, stop)`, quantised or plain."""

    @abstractmethod
    def gather(self, positions: mx.array) -> tuple[mx.array, ...]:
        """Return the keys and values at uint32 `positions` `(B, n_kv_heads, n)`."""

    def read(self, which: int, start: int, stop: int) -> mx.array:
        """Return the dequantised KEYS or VALUES of entries `[start, stop)`."""
        return unpack(self.stored(which, start, stop), self.quantization)

    def entries(self, start: int = 0, stop: int | None = None) -> tuple[mx.array, mx.array]:
        """Return the dequantised keys and values of entries `[start, stop)`, by default of all entries."""
        stop = self.n_entries if stop is None else stop
        return self.read(KEYS, start, stop), self.read(VALUES, start, stop)


class Store(EntryView):
    """A layer's entries, which can be appended to and truncated.

    Subclasses with a `name` are registered, and can be selected with the option `store=NAME`.
    """

    name: ClassVar[str]
    bits: ClassVar[int | None] = None  # bits per value, or None for plain entries
    in_files: bool = False  # whether entries are in files, which are saved in a folder
    folder: str | None = None  # folder for new files; None means TMPDIR
    cache: Any = None  # the mlx-lm cache that stores the entries, if they are in memory
    # The first entry's key and value, `(B, n_kv_heads, 1, head_dim)` each, if entries are in files. Saved caches take
    # their shapes from it.
    first_entry: tuple[mx.array, mx.array] | None = None
    nbytes: int  # size in bytes in memory
    file_nbytes: int = 0  # size in bytes in files

    @abstractmethod
    def __init__(self, quantization: Quantization | None = None):
        """Create an empty store that quantises entries, or keeps them plain if `quantization` is None."""

    def __init_subclass__(cls) -> None:
        """Register the class if it defines a `name`."""
        if "name" in vars(cls):
            STORES[cls.name] = cls

    @abstractmethod
    def append(self, entries: Entries) -> None:
        """Append entries. Raises: SnapKVError: the disk is full; the store stays unchanged."""

    @abstractmethod
    def truncate(self, n: int) -> None:
        """Drop all but the first `n` entries."""

    def reads(self, path: Path) -> bool:
        """Return whether the store reads the saved file at `path`."""
        return False

    def all_entries(self) -> Entries:
        """Return all entries as they are stored."""
        keys, values = (self.stored(which, 0, self.n_entries) for which in (KEYS, VALUES))
        return Entries(keys, values, quantization=self.quantization)


class JoinedView(EntryView):
    """Several views of successive entries, read as one.

    Attributes:
        limit: number of entries that this view includes; None includes all.
    """

    limit: int | None = None

    def __init__(self, views: Sequence[EntryView]):
        """Join views, given in order of position."""
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
        """Return the first view's function for creating spill files, or None if all entries are in memory."""
        return next((part.make_spill for part in self._parts if part.make_spill is not None), None)

    @property
    def buffers(self) -> tuple[mx.array, mx.array] | None:
        """Return the whole buffers, or None if there are several views or entries are not plain and in memory."""
        return self._parts[0].buffers if len(self._parts) == 1 else None

    def _within(self, start: int, stop: int) -> Iterator[tuple[Any, int, int]]:
        """Yield each view that overlaps `[start, stop)`, with the overlap's start and stop in this view."""
        first = 0
        for part in self._parts:
            a, b = max(start - first, 0), min(stop - first, part.n_entries)
            if a < b:
                yield part, a, b
            first += part.n_entries

    def stored(self, which: int, start: int, stop: int) -> Stored:
        """Return the stored KEYS or VALUES of entries `[start, stop)`. All views must have the same quantisation."""
        return concatenate_rows(
            *(part.stored(which, a, b) for part, a, b in self._within(start, stop))
        )

    def read(self, which: int, start: int, stop: int) -> mx.array:
        """Return the dequantised KEYS or VALUES of entries `[start, stop)`."""
        return concatenate_rows(
            *(part.read(which, a, b) for part, a, b in self._within(start, stop))
        )

    def gather(self, positions: mx.array) -> tuple[mx.array, ...]:
        """Return the keys and values at uint32 `positions` `(B, n_kv_heads, n)`, gathered from all views."""
        gathered: Any = ()
        first = 0
        for part, _, n in self._within(0, self.n_entries):
            if n == self.n_entries:
                return part.gather(positions)
            # Clip positions that belong to other views. This gathers placeholders, which are replaced below.
            entries = part.gather(mx.clip(positions, first, first + n - 1) - first)
            if gathered:
                from_part = (positions >= first)[..., None]
                entries = tuple(mx.where(from_part, *pair) for pair in zip(entries, gathered))
            gathered = entries
            first += n
        return gathered
