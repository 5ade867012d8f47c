"""What a store of a layer's entries is asked, and the registry of the kinds there are."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx

from ...entries.entries import Entries
from ...entries.quantization import KEYS, VALUES, Quantization, Stored, join, unpack
from ..held_rows import MakeAside

STORES: dict[str, type["Store"]] = {}  # keys are the values of `store`


class EntryView(ABC):
    """A layer's entries in order of position, to be read; keys and values are `(B, n_kv_heads, n, head_dim)`."""

    n_entries: int
    quantization: Quantization | None  # how they are stored, each by itself; None is as they came
    waits: bool = False  # what is read takes memory of its own: use it before more is read
    aside: MakeAside | None = None  # makes the place for rows beside entries in files

    @abstractmethod
    def stored(self, which: int, start: int, stop: int) -> Stored:
        """Return the KEYS or VALUES of entries `[start, stop)`, as they are stored."""

    @abstractmethod
    def gather(self, places: mx.array) -> tuple[mx.array, ...]:
        """Return keys and values at uint32 `places` `(B, n_kv_heads, n)`."""

    def read(self, which: int, start: int, stop: int) -> mx.array:
        """Return the KEYS or VALUES of entries `[start, stop)`, plain."""
        return unpack(self.stored(which, start, stop), self.quantization)

    def entries(self, start: int = 0, stop: int | None = None) -> tuple[mx.array, mx.array]:
        """Return keys and values of entries `[start, stop)`; by default of all."""
        stop = self.n_entries if stop is None else stop
        return self.read(KEYS, start, stop), self.read(VALUES, start, stop)


class Store(EntryView):
    """Entries that more are appended to.

    A kind of store with a `name` is registered: `store=NAME` makes one for each layer.
    """

    name: ClassVar[str]
    bits: ClassVar[int | None] = None  # bits per number; None leaves entries plain
    in_files: bool = False  # a saved cache has its entries in a folder beside the file
    folder: str | None = None  # where new files are made; None is TMPDIR
    cache: Any = None  # unless in files, mlx-lm's cache that they are in, which may go on by itself
    # Keys and values of the first entry, `(B, n_kv_heads, 1, head_dim)`, if entries are in files: a saved cache shows
    # their shapes by it.
    first_entry: tuple[mx.array, mx.array] | None = None
    nbytes: int  # bytes in memory
    file_nbytes: int = 0  # bytes in files

    @abstractmethod
    def __init__(self, quantization: Quantization | None = None): ...

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            STORES[cls.name] = cls

    @abstractmethod
    def append(self, entries: Entries) -> None:
        """Add entries. Raises: SnapKVError: there is no space for them; the store is then as it was."""

    @abstractmethod
    def truncate(self, n: int) -> None:
        """Hold the first `n` entries only."""

    def reads(self, path: Path) -> bool:
        """Return whether some of the entries are in the saved file of that name."""
        return False

    def held(self) -> Entries:
        """Return all entries, as they are stored."""
        keys, values = (self.stored(which, 0, self.n_entries) for which in (KEYS, VALUES))
        return Entries(keys, values, quantization=self.quantization)


class JoinedView(EntryView):
    """The entries of several views, one after the other."""

    def __init__(self, views: Sequence[EntryView]):
        self._parts: list[Any] = list(views)

    @property
    def n_entries(self) -> int:  # type: ignore[override]
        return sum(part.n_entries for part in self._parts)

    @property
    def waits(self) -> bool:  # type: ignore[override]
        return any(part.waits for part in self._parts)

    @property
    def aside(self) -> MakeAside | None:  # type: ignore[override]
        return next((part.aside for part in self._parts if part.aside is not None), None)

    def _within(self, start: int, stop: int) -> Iterator[tuple[Any, int, int]]:
        """Yield the views that have some of the entries `[start, stop)`, and which of their own these are."""
        first = 0
        for part in self._parts:
            a, b = max(start - first, 0), min(stop - first, part.n_entries)
            if a < b:
                yield part, a, b
            first += part.n_entries

    def stored(self, which: int, start: int, stop: int) -> Stored:
        """Return entries of views that store them alike."""
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
