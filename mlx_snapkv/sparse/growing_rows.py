"""Arrays that gain rows as the text grows, such as an index's codes.

The first rows are in memory, and later rows may be in a file. Rows in the file never change, so copies share them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise

import mlx.core as mx

from ..entries.quantization import (
    Stored,
    concatenate_rows,
    count_bytes,
    count_rows,
    flat_arrays,
    map_arrays,
    rows_to_allocate,
    slice_rows,
    with_new_rows,
    write_rows,
)
from .entry_file import SpillFile

# The rows of a text's first 65,536 entries stay in memory even if there is a spill file. A higher number would take
# more memory, and a lower number would mean more file reads.
ENTRIES_IN_MEMORY = 1 << 16
ENTRIES_MOVED = 1 << 15  # number of entries whose rows move to the file at a time


MakeSpill = Callable[[], SpillFile]


class GrowingRows:
    """An array of rows `(B, n_kv_heads, n, ...)` that can be appended to and truncated.

    The rows are in up to three places:

        [0 : n_first)                    in memory; all rows if there is no spill file
        [n_first : n_first + n_spilled)  in the spill file, in whole blocks
        [n_first + n_spilled : n)        in memory

    Args:
        empty: arrays with 0 rows, which define dtypes and shapes.
        entries_per_row: number of entries that a row summarises: the page size for page means, otherwise 1.
        make_spill: creates the spill file, for the rows of all but the first `ENTRIES_IN_MEMORY` entries. None keeps
            all rows in memory.
    """

    def __init__(
        self, empty: Stored, entries_per_row: int = 1, make_spill: MakeSpill | None = None
    ):
        """Start without rows, and create the spill file if there is a `make_spill`."""
        self._first_rows, self._last_rows = _Buffer(empty), _Buffer(empty)
        self._max_first_rows = ENTRIES_IN_MEMORY // entries_per_row  # ignored without a spill file
        self._rows_per_block = ENTRIES_MOVED // entries_per_row
        self._spill = None if make_spill is None else make_spill()
        self._block_readers: list[Callable[[], Stored]] = []

    def __len__(self) -> int:
        """Return the number of rows, in memory and in the file."""
        return self._last_start + self._last_rows.n_used

    @property
    def _n_spilled(self) -> int:
        return len(self._block_readers) * self._rows_per_block

    @property
    def _last_start(self) -> int:
        """Return the index of the first row in `_last_rows`."""
        return self._first_rows.n_used + self._n_spilled

    @property
    def reads_allocate(self) -> bool:
        """Return whether `read` allocates memory. If it does, evaluate each result before reading the next."""
        return bool(self._block_readers)

    @property
    def in_memory(self) -> tuple[mx.array, ...]:
        """Return the arrays in memory, including unused rows."""
        return (*flat_arrays(self._first_rows.stored), *flat_arrays(self._last_rows.stored))

    @property
    def buffers(self) -> Stored | None:
        """Return the whole arrays, including unused rows, or None if rows may be in a file."""
        return self._first_rows.stored if self._spill is None else None

    @property
    def nbytes(self) -> int:
        """Return the size in bytes of the arrays in memory, including unused rows."""
        return count_bytes(self.in_memory)

    @property
    def spilled_nbytes(self) -> int:
        """Return the size in bytes of the rows in the spill file."""
        one_row = slice_rows(self._first_rows.stored, 0, 1)
        return self._n_spilled * count_bytes(one_row)

    def reserve(self, n: int) -> None:
        """Allocate memory for `n` rows.

        If there is a spill file, allocate memory only for the first rows, which stay in memory.
        """
        n_in_memory = n if self._spill is None else min(n, self._max_first_rows)
        self._first_rows.reserve(n_in_memory)

    def append(self, new_rows: Stored) -> None:
        """Append rows. Raises: EntryFileError: the spill file can't be written."""
        if self._spill is None:
            self._first_rows.append(new_rows)
            return
        n_new = count_rows(new_rows)
        n_free_in_first = self._max_first_rows - self._first_rows.n_used
        n_to_first = min(n_new, n_free_in_first)
        if n_to_first > 0:
            self._first_rows.append(slice_rows(new_rows, 0, n_to_first))
        if n_to_first < n_new:
            self._last_rows.append(slice_rows(new_rows, n_to_first, n_new))
        while self._last_rows.n_used >= self._rows_per_block:
            full_block = slice_rows(self._last_rows.stored, 0, self._rows_per_block)
            read_block = self._spill.append(full_block)
            self._block_readers.append(read_block)
            n_used = self._last_rows.n_used
            later_rows = slice_rows(self._last_rows.stored, self._rows_per_block, n_used)
            self._last_rows = _Buffer(later_rows)

    def truncate(self, n: int) -> None:
        """Keep only the first `n` rows."""
        last_start = self._last_start
        self._last_rows.n_used = min(self._last_rows.n_used, max(0, n - last_start))
        block_stop = last_start
        while self._block_readers and n < block_stop:
            block_start = block_stop - self._rows_per_block
            read_block = self._block_readers.pop()
            n_left_in_block = n - block_start
            # If only part of the block is dropped, move the rest back to memory.
            if n_left_in_block > 0:
                self._last_rows = _Buffer(slice_rows(read_block(), 0, n_left_in_block))
            block_stop = block_start
        self._first_rows.n_used = min(self._first_rows.n_used, n)

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Split `[start, stop)` into spans. The rows of each span are in a single array."""
        # Spilled rows form whole blocks, so this range contains the edges of all blocks.
        block_edges = range(self._first_rows.n_used, self._last_start + 1, self._rows_per_block)
        inner_edges = [edge for edge in block_edges if start < edge < stop]
        if start < stop:
            yield from pairwise([start, *inner_edges, stop])

    def read(self, start: int, stop: int) -> Stored:
        """Return the rows `[start, stop)`, which must be in a single array; see `spans`."""
        stored, first_row, stop_row = self._locate(start, stop)
        return slice_rows(stored, first_row, stop_row)

    def read_at_least(self, start: int, stop: int) -> Stored:
        """Return the rows `[start, stop)` for a matrix product. Further rows may follow them in the result.

        MLX 0.32 can't multiply by a slice of a quantised array on CUDA, and may copy the slice on other backends.
        Therefore, if the rows start at the beginning of an array and make up at least 7/8 of it, the whole array is
        returned. Otherwise, the rows are copied. The rows must be in a single array; see `spans`.
        """
        stored, first_row, stop_row = self._locate(start, stop)
        covers_most_rows = first_row == 0 and stop_row >= 7 / 8 * count_rows(stored)
        if covers_most_rows:
            return stored
        return map_arrays(mx.contiguous, slice_rows(stored, first_row, stop_row))

    def _locate(self, start: int, stop: int) -> tuple[Stored, int, int]:
        """Return the array that contains rows `[start, stop)`, and where in the array these rows start and stop."""
        spilled_start, last_start = self._first_rows.n_used, self._last_start
        if start < spilled_start:
            return self._first_rows.stored, start, stop
        if start >= last_start:
            return self._last_rows.stored, start - last_start, stop - last_start
        block_number, start_in_block = divmod(start - spilled_start, self._rows_per_block)
        read_block = self._block_readers[block_number]
        return read_block(), start_in_block, start_in_block + (stop - start)

    def between(self, start: int, stop: int) -> Stored:
        """Return the rows `[start, stop)`, concatenated if they are in several arrays."""
        parts = [self.read(*span) for span in self.spans(start, stop)]
        if not parts:
            return slice_rows(self._first_rows.stored, 0, 0)
        return concatenate_rows(*parts)

    def __deepcopy__(self, memo: dict) -> GrowingRows:
        """Copy the rows in memory, but share the spill file, which is append-only."""
        other = copy.copy(self)
        other._first_rows = copy.deepcopy(self._first_rows, memo)
        other._last_rows = copy.deepcopy(self._last_rows, memo)
        other._block_readers = list(self._block_readers)
        return other


class _Buffer:
    """Rows in memory. The first `n_used` are in use, and the others are free."""

    def __init__(self, stored: Stored):
        self.stored = stored
        self.n_used = count_rows(stored)

    def reserve(self, n: int) -> None:
        """Allocate memory for at least `n` rows."""
        if n > count_rows(self.stored):
            used_rows = slice_rows(self.stored, 0, self.n_used)
            self.stored = with_new_rows(used_rows, rows_to_allocate(n) - self.n_used)

    def append(self, new_rows: Stored) -> None:
        n_after = self.n_used + count_rows(new_rows)
        self.reserve(n_after)
        write_rows(self.stored, self.n_used, new_rows)
        self.n_used = n_after
