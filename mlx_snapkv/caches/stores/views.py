"""A layer's entries to be read, wherever they are."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx

from ...entries.held_rows import MakeAside
from ...entries.quantization import KEYS, VALUES, Quantization, Stored, join, unpack


class EntryView(ABC):
    """A layer's entries in order of position, to be read; keys and values are `(B, n_kv_heads, n, head_dim)`."""

    n_entries: int
    quantization: Quantization | None  # how they are stored, each by itself; None is as they came
    waits: bool = False  # what is read takes memory of its own: use it before more is read
    aside: MakeAside | None = None  # makes the place for rows beside entries in files

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

    @property
    def aside(self) -> MakeAside | None:  # type: ignore[override]
        return next((part.aside for part in self._parts if part.aside is not None), None)

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
