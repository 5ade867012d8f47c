"""One operation of a graph, and the buffers that it makes, shares or writes over."""

from __future__ import annotations

from . import layout as lay
from .buffers import Array, Buffer, Memory, gives_way
from .operation import Operation


class Step:
    """One operation's allocations.

    Attributes:
        temporary: buffers that it needs only itself.
        n_tasks: what it gives the device to do, beside the note that it is done.
    """

    def __init__(self, memory: Memory, operation: Operation, ins: list[Array], outs: list[Array]):
        self.memory, self.operation = memory, operation
        self.ins, self.outs = ins, outs
        self.temporary: list[Buffer] = []
        self.n_tasks = 0

    @property
    def out(self) -> Array:
        return self.outs[0]

    @property
    def first(self) -> Array:
        return self.ins[0]

    def own(self, like: lay.Layout | None = None) -> None:
        self.memory.own(self.out, like)

    def take(self, *candidates: Array) -> bool:
        """Write the result over the first of the inputs that gives way."""
        for array in candidates:
            if gives_way(array, self.out):
                self.memory.share(self.out, array)
                return True
        return False

    def copy(self, array: Array, item: int = 0) -> None:
        """A copy of an input, of `item` bytes a number if they are others, that only this operation needs."""
        made = array.layout.size * (item or array.layout.item)
        self.temporary.append(self.memory.new(made))
        self.n_tasks += 1
