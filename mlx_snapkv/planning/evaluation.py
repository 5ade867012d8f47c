"""The memory that MLX needs to evaluate a graph, played through without computing anything.

MLX orders a graph's operations, hands them to the device one after the other, and allocates each result as it does so.
A buffer is given up when the last operation that uses it has been computed, not when it has been handed over: MLX runs
ahead by a fixed number of tasks, and the results of all these are held at once. That is why a chunk of a prompt takes
more than its largest layer. (mlx/transforms.cpp, mlx/backend/cpu and mlx/backend/metal, of MLX 0.32.)
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import mlx.core as mx

from .allocation import allocate
from .buffers import Array, Buffer, Memory
from .graph import Graph
from .layout import fresh
from .operation import Operation
from .step import Step

_WIDTH = 20  # of the breadth-first order, before it goes down


@dataclass(frozen=True)
class Backend:
    """How far a device runs behind.

    Attributes:
        batch: tasks that are counted as one.
        ahead: so many of those may be under way.
        notes: tasks that an operation takes to give its buffers up.
    """

    batch: int
    ahead: int
    notes: int


CPU = Backend(batch=10, ahead=10, notes=1)
METAL = Backend(batch=40, ahead=10, notes=0)  # operations of a command buffer; not measured


def backend() -> Backend:
    """That of MLX's default device."""
    return METAL if mx.default_device().type == mx.gpu else CPU


@dataclass
class Played:
    """What an evaluation has come to.

    Attributes:
        most: bytes in use at once, those of what the results are made of and of all arrays held included.
        results: of each result, its own bytes and the buffer that it is in, which may be larger.
    """

    most: int
    results: list[tuple[int, Buffer]]


def play(graph: Graph, device: Backend, given: dict[str, tuple[int, Buffer]]) -> Played:
    """Play through that the results of a graph are computed.

    Args:
        given: of arrays that are there already, what an earlier evaluation has told of them as its results.
    """
    memory = Memory()
    order = _order(graph)
    arrays = _arrays(graph, order, memory, given)
    under_way: deque[tuple[int, list[Buffer]]] = deque()
    n_tasks = 0
    for operation in order:
        ins = [arrays[name] for name in operation.inputs]
        outs = [arrays[name] for name in operation.outputs]
        step = Step(memory, operation, ins, outs)
        allocate(step)
        n_tasks += step.n_tasks + device.notes
        used = {array.buffer for array in (*ins, *outs[1:])} - {outs[0].buffer}
        used.update(step.temporary)
        for buffer in used:
            buffer.n_uses += 1
        under_way.append((n_tasks, list(used)))
        for array in ins:
            array.n_asking -= 1
            if array.n_asking == 0:
                memory.drop(array)
        for array in outs:
            if array.n_asking == 0:
                memory.drop(array)
        done = device.batch * (n_tasks // device.batch - device.ahead)
        while under_way and under_way[0][0] <= done:
            for buffer in under_way.popleft()[1]:
                buffer.n_uses -= 1
                memory.release(buffer)
    results = [arrays[name] for name in graph.results]
    return Played(memory.most, [(array.layout.n_bytes, array.buffer) for array in results])


def _arrays(
    graph: Graph,
    order: list[Operation],
    memory: Memory,
    given: dict[str, tuple[int, Buffer]],
) -> dict[str, Array]:
    """All arrays that take part, those that are there already in buffers."""
    arrays: dict[str, Array] = {}

    def asked(name: str) -> None:
        if name not in arrays:
            arrays[name] = Array(fresh(*graph.arrays[name]))
        arrays[name].n_asking += 1

    for operation in order:
        for name in operation.inputs:
            asked(name)
        for name in operation.outputs:
            arrays.setdefault(name, Array(fresh(*graph.arrays[name])))
    for name in (*graph.results, *graph.held):
        asked(name)
    made = {name for operation in order for name in operation.outputs}
    buffers: dict[Buffer, Buffer] = {}
    for name, array in arrays.items():
        if name in made:
            continue
        n_bytes, buffer = given.get(name, (-1, array.buffer))
        if n_bytes != array.layout.n_bytes:
            memory.own(array)
            continue
        if buffer not in buffers:
            buffers[buffer] = memory.new(buffer.n_bytes)
        array.buffer = buffers[buffer]
        array.buffer.n_arrays += 1
    return arrays


def _order(graph: Graph) -> list[Operation]:
    """The operations as MLX evaluates them: breadth first from the results, within a width, and then backwards."""
    last = Operation("results", list(graph.results))
    waiting = _readers(graph, last)
    order, i = [last], 0
    stack: list[tuple[Operation, int]] = []
    while waiting and (i < len(order) or stack):
        if i < len(order):
            operation, first = order[i], 0
            i += 1
        else:
            operation, first = stack.pop()
        for j in range(first, len(operation.inputs)):
            below = graph.made_by.get(operation.inputs[j])
            if below is None:
                continue
            if len(order) - i >= _WIDTH:
                stack.append((operation, j))
                break
            waiting[below] -= 1
            if not waiting[below]:
                del waiting[below]
                order.append(below)
    return order[:0:-1]


def _readers(graph: Graph, last: Operation) -> dict[Operation, int]:
    """How often each operation's results are read."""
    count: dict[Operation, int] = {}
    todo = [last]
    while todo:
        for name in todo.pop().inputs:
            below = graph.made_by.get(name)
            if below is not None:
                if below not in count:
                    todo.append(below)
                count[below] = count.get(below, 0) + 1
    return count
