"""Rows that grow with a text, as an index's codes do: the first in memory, later ones in a file, if there is one.

What is put aside never changes, so that copies share it.
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

ENTRIES_IN_MEMORY = 1 << 16  # entries whose rows stay in memory
ENTRIES_MOVED = 1 << 15  # entries whose rows are put aside together


class Aside(Protocol):
    """Where rows are put that are not to be in memory."""

    def put(self, stored: Stored) -> Callable[[], Stored]:
        """Put rows there; the result reads them. Raises: SnapKVError: there is no room."""
        ...


MakeAside = Callable[[], Aside]


class HeldRows:
    """Rows `(B, n_kv_heads, n, ...)`, appended and cut at the end.

        [0 : n_first)                  in memory, where there is no other place all of them
        [n_first : n_first + n_aside)  put aside, whole blocks
        [n_first + n_aside : n)        in memory

    Args:
        empty: none of them, to show how they are stored.
        stands_for: entries that a row stands for.
        aside: makes the place for rows beyond those of the first `ENTRIES_IN_MEMORY` entries.
    """

    def __init__(self, empty: Stored, stands_for: int = 1, aside: MakeAside | None = None):
        self._first, self._last = _Buffer(empty), _Buffer(empty)
        self._most, self._block = ENTRIES_IN_MEMORY // stands_for, ENTRIES_MOVED // stands_for
        self._aside = None if aside is None else aside()
        self._blocks: list[Callable[[], Stored]] = []

    def __len__(self) -> int:
        return self._first.n + self._n_aside + self._last.n

    @property
    def _n_aside(self) -> int:
        return len(self._blocks) * self._block

    @property
    def waits(self) -> bool:
        """Whether what is read may take memory of its own, and is to be used before more is read."""
        return bool(self._blocks)

    @property
    def in_memory(self) -> tuple[mx.array, ...]:
        """The arrays that are in memory, with room for more."""
        return (*arrays(self._first.stored), *arrays(self._last.stored))

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return n_bytes(self.in_memory)

    @property
    def aside_nbytes(self) -> int:
        """Bytes that are put aside."""
        return self._n_aside * n_bytes(rows(self._first.stored, 0, 1))

    def append(self, new: Stored) -> None:
        """Raises: SnapKVError: there is no room for what is put aside."""
        if self._aside is None:
            self._first.append(new)
            return
        n = n_rows(new)
        n_first = min(n, self._most - self._first.n)
        if n_first > 0:
            self._first.append(rows(new, 0, n_first))
        if n_first < n:
            self._last.append(rows(new, n_first, n))
        while self._last.n >= self._block:
            last = self._last.stored
            self._blocks.append(self._aside.put(rows(last, 0, self._block)))
            self._last = _Buffer(rows(last, self._block, self._last.n))

    def truncate(self, n: int) -> None:
        """Hold the first `n` rows only."""
        before = self._first.n + self._n_aside
        self._last.n = min(self._last.n, max(0, n - before))
        while self._blocks and n < before:
            before -= self._block
            block = self._blocks.pop()
            if n > before:
                self._last = _Buffer(rows(block(), 0, n - before))
        self._first.n = min(self._first.n, n)

    def together(self, n: int) -> bool:
        """Whether the first `n` rows lie together."""
        return n <= self._first.n

    def spans(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Where the parts of `[start, stop)` begin and end that lie together, which `read` gives."""
        begin = self._first.n
        edges = {start, stop, *range(begin, begin + self._n_aside + 1, self._block)}
        yield from pairwise(sorted(edge for edge in edges if start <= edge <= stop))

    def read(self, start: int, stop: int) -> Stored:
        """The rows `[start, stop)`, which lie together; see `spans`."""
        return rows(*self._lying(start, stop))

    def reach(self, start: int, stop: int) -> Stored:
        """The same and perhaps others behind them, to be multiplied by: on CUDA MLX (0.32) has no product with a part
        of a quantised array, and elsewhere it may copy one.
        """
        stored, start, stop = self._lying(start, stop)
        if start == 0 and 8 * stop >= 7 * n_rows(stored):
            return stored
        return each(mx.contiguous, rows(stored, start, stop))

    def _lying(self, start: int, stop: int) -> tuple[Stored, int, int]:
        """Where the rows `[start, stop)` lie: among which, from where to where."""
        first = self._first.n
        if start < first:
            return self._first.stored, start, stop
        number, at = divmod(start - first, self._block)
        if number < len(self._blocks):
            return self._blocks[number](), at, at + stop - start
        behind = first + self._n_aside
        return self._last.stored, start - behind, stop - behind

    def between(self, start: int, stop: int) -> Stored:
        """The rows `[start, stop)`, wherever they are."""
        parts = [self.read(*span) for span in self.spans(start, stop)]
        return join(*parts) if parts else rows(self._first.stored, 0, 0)

    def __deepcopy__(self, memo: dict) -> HeldRows:
        other = copy.copy(self)
        other._first, other._last = copy.deepcopy((self._first, self._last), memo)
        other._blocks = list(self._blocks)
        return other


class _Buffer:
    """Rows in memory, with room for more."""

    def __init__(self, stored: Stored):
        self.stored, self.n = stored, n_rows(stored)

    def append(self, new: Stored) -> None:
        end = self.n + n_rows(new)
        if end > n_rows(self.stored):
            self.stored = grown(rows(self.stored, 0, self.n), with_room(end) - self.n)
        write(self.stored, self.n, new)
        self.n = end
