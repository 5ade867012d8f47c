"""The interface of a store of a layer's entries, and the registry of stores."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx

from ...entries.entries import Entries
from ...entries.quantization import KEYS, VALUES, Quantization, Stored, join, unpack
from ..held_rows import MakeAside

STORES: dict[str, type["Store"]] = {}  # value of the option `store` -> class


class EntryView(ABC):
    """Reads a layer's entries in order of position; keys and values are `(B, n_kv_heads, n, head_dim)`."""

    n_entries: int
    quantization: Quantization | None  # how entries are packed; None keeps their dtype
    waits: bool = False  # `read` allocates memory: use its result before reading more
    aside: MakeAside | None = None  # makes one more file if the entries are in files

    @property
    def buffers(self) -> tuple[mx.array, mx.array] | None:
        """Return the whole buffers `(B, n_kv_heads, capacity, head_dim)` of plain entries in memory, or None."""
        return None

    @abstractmethod
    def stored(self, which: int, start: int, stop: int) -> Stored:
        """Return the KEYS or VALUES of entries `[start, stop)`, packed as they are stored."""

    @abstractmethod
    def gather(self, places: mx.array) -> tuple[mx.array, ...]:
        """Return keys and values at uint32 `places` `(B, n_kv_heads, n)`."""

    def read(self, which: int, start: int, stop: int) -> mx.array:
        """Return the KEYS or VALUES of entries `[start, stop)`, unpacked."""
        return unpack(self.stored(which, start, stop), self.quantization)

    def entries(self, start: int = 0, stop: int | None = None) -> tuple[mx.array, mx.array]:
        """Return keys and values of entries `[start, stop)`, unpacked; by default of all entries."""
        stop = self.n_entries if stop is None else stop
        return self.read(KEYS, start, stop), self.read(VALUES, start, stop)


class Store(EntryView):
    """A layer's entries, to which more can be appended.

    A subclass with a `name` is registered; `store=NAME` makes one store of it for each layer.
    """

    name: ClassVar[str]
    bits: ClassVar[int | None] = None  # bits per number; None leaves entries plain
    in_files: bool = False  # entries are in files; a saved cache has a folder of them
    folder: str | None = None  # folder of new files; None is TMPDIR
    cache: Any = None  # mlx-lm's cache with the entries, if they are in memory
    # Keys and values `(B, n_kv_heads, 1, head_dim)` of the first entry, if entries are in files. A saved cache keeps
    # this entry for the shapes.
    first_entry: tuple[mx.array, mx.array] | None = None
    nbytes: int  # bytes in memory
    file_nbytes: int = 0  # bytes in files

    @abstractmethod
    def __init__(self, quantization: Quantization | None = None):
        """Make a store without entries, which packs entries by `quantization`; None keeps their dtype."""

    def __init_subclass__(cls) -> None:
        """Register a class that has a `name` of its own."""
        if "name" in vars(cls):
            STORES[cls.name] = cls

    @abstractmethod
    def append(self, entries: Entries) -> None:
        """Append entries. Raises: SnapKVError: there is no space; the store is then unchanged."""

    @abstractmethod
    def truncate(self, n: int) -> None:
        """Drop all entries but the first `n`."""

    def reads(self, path: Path) -> bool:
        """Return whether some of the entries are in the saved file at `path`."""
        return False

    def all_entries(self) -> Entries:
        """Return all entries, packed as they are stored."""
        keys, values = (self.stored(which, 0, self.n_entries) for which in (KEYS, VALUES))
        return Entries(keys, values, quantization=self.quantization)


class JoinedView(EntryView):
    """The entries of several views, one after the other.

    Attributes:
        limit: number of entries of the views that are in this one, from the first on; None for all.
    """

    limit: int | None = None

    def __init__(self, views: Sequence[EntryView]):
        """Join views in order of position."""
        self._parts: list[Any] = list(views)

    @property
    def n_entries(self) -> int:  # type: ignore[override]
        """Return the number of entries in all views, up to `limit`."""
        n = sum(part.n_entries for part in self._parts)
        return n if self.limit is None else min(n, self.limit)

    @property
    def waits(self) -> bool:  # type: ignore[override]
        """Return whether reading any of the views allocates memory."""
        return any(part.waits for part in self._parts)

    @property
    def aside(self) -> MakeAside | None:  # type: ignore[override]
        """Return the first view's maker of files for rows beside the entries; None if all are in memory."""
        return next((part.aside for part in self._parts if part.aside is not None), None)

    @property
    def buffers(self) -> tuple[mx.array, mx.array] | None:
        """Return the buffers of the only view; None if there are several, or its entries are not plain."""
        return self._parts[0].buffers if len(self._parts) == 1 else None

    def _within(self, start: int, stop: int) -> Iterator[tuple[Any, int, int]]:
        """Yield each view that has some of the entries `[start, stop)`, and their span in that view."""
        first = 0
        for part in self._parts:
            a, b = max(start - first, 0), min(stop - first, part.n_entries)
            if a < b:
                yield part, a, b
            first += part.n_entries

    def stored(self, which: int, start: int, stop: int) -> Stored:
        """Return entries `[start, stop)` of views that pack them alike."""
        return join(*(part.stored(which, a, b) for part, a, b in self._within(start, stop)))

    def read(self, which: int, start: int, stop: int) -> mx.array:
        """Return the KEYS or VALUES of entries `[start, stop)`, unpacked and joined."""
        return join(*(part.read(which, a, b) for part, a, b in self._within(start, stop)))

    def gather(self, places: mx.array) -> tuple[mx.array, ...]:
        """Return keys and values at uint32 `places` `(B, n_kv_heads, n)`, from whichever view has them."""
        gathered: Any = ()
        first = 0
        for part, _, n in self._within(0, self.n_entries):
            if n == self.n_entries:
                return part.gather(places)
            # Places outside the part read any of its entries, which other parts replace.
            entries = part.gather(mx.clip(places, first, first + n - 1) - first)
            if gathered:
                from_part = (places >= first)[..., None]
                entries = tuple(mx.where(from_part, *pair) for pair in zip(entries, gathered))
            gathered = entries
            first += n
        return gathered
