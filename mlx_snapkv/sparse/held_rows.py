"""Rows that grow with a text, such as the codes of an index: the first in memory, later ones perhaps in a file.

Rows in the file never change, so that copies share them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Protocol

import mlx.core as mx

from ..entries.quantization import (
    Stored,
    arrays,
    each,
    grown,
    join,
    n_bytes,
    n_rows,
    rows,
    with_room,
    write,
)

# The rows of this many entries stay in memory where the others go to a file: more memory, or more reads.
ENTRIES_IN_MEMORY = 1 << 16
ENTRIES_MOVED = 1 << 15  # the rows of this many entries move to the file together


class Aside(Protocol):
    """A place for rows outside memory; `stores.file.AsideFile` is one."""

    def put(self, stored: Stored) -> Callable[[], Stored]:
        """Write rows, and return a function that reads them. Raises: SnapKVError: there is no room."""
        ...


MakeAside = Callable[[], Aside]


class HeldRows:
    """Rows `(B, n_kv_heads, n, ...)`, appended and cut at the end.

        [0 : n_first)                  in memory; without `aside` all rows
        [n_first : n_first + n_aside)  aside (in a file), whole blocks
        [n_first + n_aside : n)        in memory

    Args:
        empty: arrays of 0 rows, for their dtypes and shapes.
        stands_for: number of entries that a row is computed from; a row of page means is computed from a page.
        aside: makes the place for rows after the first `ENTRIES_IN_MEMORY` entries.
    """

    def __init__(self, empty: Stored, stands_for: int = 1, aside: MakeAside | None = None):
        """Start without rows; `aside` is called once."""
        self._first, self._last = _Buffer(empty), _Buffer(empty)
        self._n_in_memory = ENTRIES_IN_MEMORY // stands_for
        self._block_rows = ENTRIES_MOVED // stands_for
        self._aside = None if aside is None else aside()
        self._block_readers: list[Callable[[], Stored]] = []

    def __len__(self) -> int:
        """Return the number of rows, in memory and aside."""
        return self._first.n + self._n_aside + self._last.n

    @property
    def _n_aside(self) -> int:
        return len(self._block_readers) * self._block_rows

    @property
    def waits(self) -> bool:
        """Return whether `read` allocates memory, so that its result should be used before more is read."""
        return bool(self._block_readers)

    @property
    def in_memory(self) -> tuple[mx.array, ...]:
        """Return the arrays in memory, with their free rows."""
        return (*arrays(self._first.stored), *arrays(self._last.stored))

    @property
    def buffers(self) -> Stored | None:
        """Return the arrays with all rows and free rows after them; None if some rows are aside."""
        return self._first.stored if self._aside is None else None

    @property
    def nbytes(self) -> int:
        """Return the bytes in memory."""
        return n_bytes(self.in_memory)

    @property
    def aside_nbytes(self) -> int:
        """Return the bytes aside."""
        return self._n_aside * n_bytes(rows(self._first.stored, 0, 1))

    def reserve(self, n: int) -> None:
        """Make room for `n` rows in memory, or for the most that are kept there."""
        self._first.reserve(n if self._aside is None else min(n, self._n_in_memory))

    def append(self, new: Stored) -> None:
        """Append rows. Raises: SnapKVError: there is no room for rows aside."""
        if self._aside is None:
            self._first.append(new)
            return
        n = n_rows(new)
        n_first = min(n, self._n_in_memory - self._first.n)
        if n_first > 0:
            self._first.append(rows(new, 0, n_first))
        if n_first < n:
            self._last.append(rows(new, n_first, n))
        while self._last.n >= self._block_rows:
            last = self._last.stored
            self._block_readers.append(self._aside.put(rows(last, 0, self._block_rows)))
            self._last = _Buffer(rows(last, self._block_rows, self._last.n))

    def truncate(self, n: int) -> None:
        """Drop all rows but the first `n`."""
        last_start = self._first.n + self._n_aside  # number of the first row in `_last`
        self._last.n = min(self._last.n, max(0, n - last_start))
        while self._block_readers and n < last_start:
            # A block aside is cut or dropped; rows that are left of it return to memory.
            last_start -= self._block_rows
            read = self._block_readers.pop()
            if n > last_start:
                self._last = _Buffer(rows(read(), 0, n - last_start))
        self._first.n = min(self._first.n, n)

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the spans of `[start, stop)` whose rows are in one array each, as `read` needs them."""
        begin = self._first.n
        edges = {start, stop, *range(begin, begin + self._n_aside + 1, self._block_rows)}
        yield from pairwise(sorted(edge for edge in edges if start <= edge <= stop))

    def read(self, start: int, stop: int) -> Stored:
        """Return the rows `[start, stop)` of one of the `spans`."""
        return rows(*self._locate(start, stop))

    def read_at_least(self, start: int, stop: int) -> Stored:
        """Return the rows `[start, stop)` for a product, perhaps with more rows at the end.

        MLX (0.32) can't multiply by a part of a quantised array on CUDA, and elsewhere it may copy the part.
        """
        stored, start, stop = self._locate(start, stop)
        if start == 0 and 8 * stop >= 7 * n_rows(stored):
            return stored
        return each(mx.contiguous, rows(stored, start, stop))

    def _locate(self, start: int, stop: int) -> tuple[Stored, int, int]:
        """Return the array that has the rows `[start, stop)`, and their span in it."""
        first = self._first.n
        if start < first:
            return self._first.stored, start, stop
        number, row = divmod(start - first, self._block_rows)
        if number < len(self._block_readers):  # the rows are in a block outside memory
            read = self._block_readers[number]
            return read(), row, row + stop - start
        n_before = first + self._n_aside
        return self._last.stored, start - n_before, stop - n_before

    def between(self, start: int, stop: int) -> Stored:
        """Return the rows `[start, stop)`, joined if they are in several arrays."""
        parts = [self.read(*span) for span in self.spans(start, stop)]
        return join(*parts) if parts else rows(self._first.stored, 0, 0)

    def __deepcopy__(self, memo: dict) -> HeldRows:
        """Copy the rows in memory; the copy shares the place aside, which is only appended to."""
        other = copy.copy(self)
        other._first, other._last = copy.deepcopy((self._first, self._last), memo)
        other._block_readers = list(self._block_readers)
        return other


class _Buffer:
    """Rows in memory, with free rows at the end; the first `n` are used."""

    def __init__(self, stored: Stored):
        self.stored = stored
        self.n = n_rows(stored)

    def reserve(self, n: int) -> None:
        """Make room for at least `n` rows."""
        if n > n_rows(self.stored):
            self.stored = grown(rows(self.stored, 0, self.n), with_room(n) - self.n)

    def append(self, new: Stored) -> None:
        end = self.n + n_rows(new)
        self.reserve(end)
        write(self.stored, self.n, new)
        self.n = end
