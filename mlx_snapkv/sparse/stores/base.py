"""Base classes for the stores that keep a layer's entries, and the registry of stores."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import mlx.core as mx

from ...entries.entries import Entries
from ...entries.quantization import KEYS, VALUES, Quantization, concatenate_rows
from ..growing_rows import MakeSpill

STORES: dict[str, type["Store"]] = {}  # value of the `store` option -> class


class EntryView(ABC):
    """A read-only view of a layer's entries, by position. Keys and values are `(B, n_kv_heads, n, head_dim)`."""

    n_entries: int
    # Whether `read` allocates memory. If it does, evaluate each result before reading the next.
    reads_allocate: bool = False
    # Creates a `SpillFile` for rows computed from the entries, such as codes. None if the entries are in memory.
    make_spill: MakeSpill | None = None

    @property
    def buffers(self) -> tuple[mx.array, mx.array] | None:
        """Return the whole buffers `(B, n_kv_heads, capacity, head_dim)` of plain entries in memory, otherwise None."""
        return None

    @abstractmethod
    def read(self, which: int, start: int, stop: int) -> mx.array:
        """Return the dequantised KEYS or VALUES of entries `[start, stop)`."""

    @abstractmethod
    def gather(self, positions: mx.array) -> tuple[mx.array, ...]:
        """Return the dequantised keys and values at uint32 `positions` `(B, n_kv_heads, n)`."""

    def entries(self, start: int = 0, stop: int | None = None) -> tuple[mx.array, mx.array]:
        """Return the dequantised keys and values of entries `[start, stop)`, or of all entries by default."""
        stop = self.n_entries if stop is None else stop
        return self.read(KEYS, start, stop), self.read(VALUES, start, stop)


class Store(EntryView):
    """A view of a layer's entries that can also append entries, and drop the last ones.

    Subclasses with a `name` are registered, and can be selected with the option `store=NAME`.
    """

    name: ClassVar[str]
    bits: ClassVar[int | None] = None  # bits per value, or None for plain entries
    quantization: Quantization | None = None  # None if the entries are plain
    in_files: bool = False  # whether entries are in files
    folder: str | None = None  # folder for new files; None means TMPDIR
    cache: Any = None  # the mlx-lm cache that stores the entries, if they are in memory
    # The first entry's key and value, `(B, n_kv_heads, 1, head_dim)` each, if entries are in files. A saved prompt's
    # `.safetensors` file contains no other entries of the layer, and this one only to record shapes and dtypes.
    first_entry: tuple[mx.array, mx.array] | None = None
    nbytes: int  # size in bytes of the entries that are in memory
    file_nbytes: int = 0  # size in bytes of the entries that are in files

    @abstractmethod
    def __init__(self, quantization: Quantization | None = None):
        """Create an empty store that quantises entries, or keeps them plain if `quantization` is None."""

    def __init_subclass__(cls) -> None:
        """Register the class if it defines a `name`."""
        if "name" in vars(cls):
            STORES[cls.name] = cls

    @abstractmethod
    def append(self, entries: Entries) -> None:
        """Append entries. An error leaves the store unchanged. Raises: SnapKVError: the store can't be written."""

    @abstractmethod
    def truncate(self, n: int) -> None:
        """Drop all but the first `n` entries."""

    def all_entries(self) -> Entries:
        """Return all entries as stored. A store of quantised entries overrides this method."""
        return Entries(*self.entries())


class JoinedView(EntryView):
    """Several views of successive entries, read as one.

    Attributes:
        limit: maximum number of entries in this view, or None for all entries.
    """

    limit: int | None = None

    def __init__(self, views: Sequence[EntryView]):
        """Join views that are in order of position."""
        self._views: list[Any] = list(views)

    @property
    def n_entries(self) -> int:  # type: ignore[override]
        """Return the number of entries in this view."""
        n_in_all_views = sum(view.n_entries for view in self._views)
        return n_in_all_views if self.limit is None else min(n_in_all_views, self.limit)

    @property
    def reads_allocate(self) -> bool:  # type: ignore[override]
        """Return whether reading any of the views allocates memory."""
        return any(view.reads_allocate for view in self._views)

    @property
    def make_spill(self) -> MakeSpill | None:  # type: ignore[override]
        """Return the first `make_spill` among the views, or None if all entries are in memory."""
        functions = (view.make_spill for view in self._views)
        return next((make_spill for make_spill in functions if make_spill is not None), None)

    @property
    def buffers(self) -> tuple[mx.array, mx.array] | None:
        """Return the whole buffers if there is a single view of plain entries in memory, otherwise None."""
        if len(self._views) != 1:
            return None
        [view] = self._views
        return view.buffers

    def _overlaps(self, start: int, stop: int) -> Iterator[tuple[Any, int, int]]:
        """Yield each view that overlaps `[start, stop)`, and where in the view the overlap starts and stops."""
        view_start = 0  # position of the view's first entry
        for view in self._views:
            first_in_view = max(start - view_start, 0)
            stop_in_view = min(stop - view_start, view.n_entries)
            if first_in_view < stop_in_view:
                yield view, first_in_view, stop_in_view
            view_start += view.n_entries

    def read(self, which: int, start: int, stop: int) -> mx.array:
        """Return the dequantised KEYS or VALUES of entries `[start, stop)`."""
        overlaps = self._overlaps(start, stop)
        return concatenate_rows(*(view.read(which, *span) for view, *span in overlaps))

    def gather(self, positions: mx.array) -> tuple[mx.array, ...]:
        """Return the keys and values at uint32 `positions` `(B, n_kv_heads, n)`, gathered from all views."""
        earlier_entries: tuple[mx.array, ...] | None = None
        view_start = 0
        for view, _, n_in_view in self._overlaps(0, self.n_entries):
            has_all_entries = n_in_view == self.n_entries
            if has_all_entries:
                return view.gather(positions)
            # Clip positions that belong to other views. The entries gathered for clipped positions are discarded.
            view_stop = view_start + n_in_view
            clipped_positions = mx.clip(positions, view_start, view_stop - 1)
            entries = view.gather(clipped_positions - view_start)
            if earlier_entries is not None:
                is_in_view = (positions >= view_start)[..., None]
                pairs = zip(entries, earlier_entries)
                entries = tuple(mx.where(is_in_view, new, earlier) for new, earlier in pairs)
            earlier_entries = entries
            view_start = view_stop
        return earlier_entries or ()
