"""How an array lies in its buffer, by MLX's rules: strides, and whether it has holes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """An array's shape, bytes of a number, strides, numbers in its buffer, and flags as MLX has them.

    Attributes:
        contiguous: its numbers fill a buffer without holes, in whatever order.
        row, column: in the order of rows, or of columns.
    """

    shape: Shape
    item: int
    strides: Shape
    n_stored: int
    contiguous: bool
    row: bool
    column: bool

    @cached_property
    def size(self) -> int:
        return prod(self.shape)

    @cached_property
    def n_bytes(self) -> int:
        return self.size * self.item

    @property
    def is_matrix(self) -> bool:
        """Whether matrix products read it as it is: rows or columns of the last two axes follow each other."""
        *_, outer, inner = self.strides
        return (outer, inner) in ((self.shape[-1], 1), (1, self.shape[-2]))

    def flagged(self, strides: Shape, contiguous: bool, row: bool, column: bool, n: int) -> Layout:
        return replace(
            self, strides=strides, contiguous=contiguous, row=row, column=column, n_stored=n
        )


@lru_cache(maxsize=10_000)
def fresh(shape: Shape, item: int) -> Layout:
    """Of an array in a buffer of its own, in the order of rows."""
    size = prod(shape)
    vector = size <= 1 or size == max(shape)
    return Layout(shape, item, _row_strides(shape), size, True, True, vector)


def spread(a: Layout, out: Layout) -> Layout:
    """`a` broadcast to the shape of `out`."""
    missing = len(out.shape) - len(a.shape)
    own = (0 if n == 1 else stride for n, stride in zip(a.shape, a.strides))
    same = out.size <= a.size
    strides = (0,) * missing + tuple(own)
    return out.flagged(strides, a.contiguous, a.row and same, a.column and same, a.n_stored)


def with_strides(a: Layout, out: Layout, strides: Shape) -> Layout:
    """`a` with axes of one number put in or left out."""
    return out.flagged(strides, a.contiguous, a.row, a.column, a.n_stored)


def transposed(a: Layout, out: Layout, axes: list[int]) -> Layout:
    strides = tuple(a.strides[axis] for axis in axes)
    if not (a.contiguous and a.n_stored == a.size):
        return with_strides(a, out, strides)
    _, row, column = _contiguity(out.shape, strides)
    return out.flagged(strides, True, row, column, a.n_stored)


def strided(out: Layout, strides: Shape) -> Layout:
    """A part of a buffer: what lies between its first and its last number counts as stored."""
    span = sum(abs(stride) * (n - 1) for stride, n in zip(strides, out.shape)) + 1
    n, row, column = _contiguity(out.shape, strides)
    return out.flagged(strides, n == span, row, column, span)


def part(a: Layout, out: Layout) -> Layout:
    """One of the parts that `a` is split into."""
    n, row, column = _contiguity(out.shape, a.strides)
    contiguous = n == 1 or (a.contiguous and (n == a.n_stored or row or column))
    return out.flagged(a.strides, contiguous, row, column, n)


def reshaped(a: Layout, out: Layout) -> Layout | None:
    """`a` in another shape, in the same buffer; None if it has to be copied for that."""
    strides = _reshaped_strides(a, out.shape)
    if strides is None:
        return None
    column = a.column
    if a.row:
        column = out.size <= 1 or out.size == max(out.shape)
    return out.flagged(strides, a.contiguous, a.row, column, a.n_stored)


def _row_strides(shape: Shape) -> Shape:
    strides, stride = [], 1
    for n in reversed(shape):
        strides.append(stride)
        stride *= n
    return tuple(reversed(strides))


def _contiguity(shape: Shape, strides: Shape) -> tuple[int, bool, bool]:
    """Numbers that differ in place, and whether they are in the order of rows, or of columns."""
    pairs = list(zip(shape, strides))
    row, column = _in_order(reversed(pairs)), _in_order(pairs)
    return prod(n for n, stride in pairs if stride > 0), row, column


def _in_order(pairs) -> bool:
    expected = 1
    for n, stride in pairs:
        if stride != expected and n != 1:
            return False
        expected *= n
    return True


def _reshaped_strides(a: Layout, shape: Shape) -> Shape | None:
    if a.row or not a.size:
        return _row_strides(shape)
    lengths: list[int] = []
    strides: list[int] = []
    for n, stride in zip(a.shape, a.strides):  # axes that follow each other count as one
        if n != 1 and strides and strides[-1] == stride * n:
            lengths[-1] *= n
            strides[-1] = stride
        elif n != 1:
            lengths.append(n)
            strides.append(stride)
    if not lengths:
        return _row_strides(shape)
    made: list[int] = []
    i = 0
    for n in shape:
        if i < len(lengths) and lengths[i] % n == 0:
            lengths[i] //= n
            made.append(lengths[i] * strides[i])
            i += lengths[i] == 1
        elif n == 1:
            made.append(made[-1])
        else:
            return None
    return tuple(made)
