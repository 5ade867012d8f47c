"""Buffers and arrays of an evaluation that is played through, and the bytes that they take."""

from __future__ import annotations

from dataclasses import dataclass, field

from .layout import Layout

_SPARE = 16384  # bytes by which a buffer may be too large for a result that takes it over


@dataclass(eq=False)
class Buffer:
    """Some bytes, the arrays in them, and the operations under way that use them."""

    n_bytes: int
    n_arrays: int = 0
    n_uses: int = 0


@dataclass(eq=False)
class Array:
    """An array: where it lies, and how many operations and others still ask for it."""

    layout: Layout
    buffer: Buffer = field(default_factory=lambda: Buffer(0))
    n_asking: int = 0


class Memory:
    """The bytes in use, and the most so far."""

    def __init__(self):
        self.in_use = self.most = 0

    def new(self, n_bytes: int) -> Buffer:
        self.in_use += n_bytes
        self.most = max(self.most, self.in_use)
        return Buffer(n_bytes)

    def release(self, buffer: Buffer) -> None:
        """Give a buffer up if nothing is in it and nothing uses it."""
        if buffer.n_arrays + buffer.n_uses == 0:
            self.in_use -= buffer.n_bytes

    def own(self, array: Array, like: Layout | None = None) -> None:
        """A buffer for an array; as large as that of `like` has to be, and in its order."""
        if like is not None:
            a = array.layout
            flags = like.contiguous, like.row, like.column
            array.layout = a.flagged(like.strides, *flags, like.n_stored)
        array.buffer = self.new(array.layout.n_stored * array.layout.item)
        array.buffer.n_arrays = 1

    def share(self, array: Array, other: Array, layout: Layout | None = None) -> None:
        """Put an array into another one's buffer, as it lies there or in a `layout` of its own."""
        a, b = array.layout, other.layout
        flags = b.contiguous, b.row, b.column
        array.layout = layout or a.flagged(b.strides, *flags, b.n_stored)
        array.buffer = other.buffer
        array.buffer.n_arrays += 1

    def drop(self, array: Array) -> None:
        """Forget an array for which nobody asks."""
        array.buffer.n_arrays -= 1
        self.release(array.buffer)


def is_free(array: Array) -> bool:
    """Whether only one operation asks for an array, and nothing else is in its buffer or uses it."""
    buffer = array.buffer
    return array.n_asking == 1 and buffer.n_arrays == 1 and buffer.n_uses == 0


def gives_way(array: Array, out: Array) -> bool:
    """Whether a result can be written over an operation's input."""
    mine, other = array.layout, out.layout
    fits = array.buffer.n_bytes <= other.n_bytes + _SPARE
    return mine.item == other.item and fits and is_free(array)
