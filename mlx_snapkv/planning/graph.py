"""The graph of arrays that are still to be computed: which operation makes what of what, and their shapes.

MLX tells each half elsewhere. `export_to_dot` has the graph as it will be evaluated, but no shapes; `export_function`
has shapes and arguments, but merges what is computed twice alike, and knows no operation that `mx.compile` has fused.
So the graph is made twice, with and without fusing, and both are walked side by side, from the results down.
"""

from __future__ import annotations

import contextlib
import io
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..errors import SnapKVError
from .fusion import FUSED, NAMED, PASSED_ON, fused_inputs
from .operation import Operation

_STACK = (
    512 << 20
)  # bytes: MLX walks graphs by recursion, a linear layer's as deep as its tokens are many
_NUMBER: tuple[tuple[int, ...], int] = (), 4  # a constant in a formula

_MOST_NAMES = 1000  # that can be given at once
_NAME = re.compile(r'"(\w+)"')
_NODE = re.compile(r'^\{ (\d+) \[label ="([^"]*)"')
_READS = re.compile(r'^"(\w+)" -> (\d+)$')
_MAKES = re.compile(r'^(\d+) -> "(\w+)"$')


@dataclass
class Graph:
    """Operations by the arrays that they make; the shape and the bytes of a number of every array.

    Attributes:
        results: the names of what is to be computed, in the order in which it was given.
        held: of the arrays that stay, whatever is computed.
        beside: of the other arrays that were given.
    """

    made_by: dict[str, Operation]
    arrays: dict[str, tuple[tuple[int, ...], int]]
    results: list[str]
    held: list[str]
    beside: list[str]


# Results, arrays that stay whatever is computed, and others that come of the same operations but are not wanted.
Made = tuple[list[mx.array], list[mx.array], list[mx.array]]


def capture(build: Callable[[], Made]) -> Graph:
    """The graph of what `build` makes.

    Args:
        build: makes the same anew, of arrays of its own, at each call.

    Raises:
        SnapKVError: MLX can't tell the shapes of an operation.
    """
    with _exportable():
        plain = _unfused(build)
        known, arrays = _in_large_stack(lambda: _with_shapes([x for part in plain for x in part]))
        results, stays, beside = build()
    whole = [*results, *stays, *beside]
    names = _names(whole)
    made_by = _in_large_stack(lambda: _structure(whole))
    try:
        arrays = _carried_over(made_by, known, arrays, names)
    except LookupError:  # fused in a way not foreseen: counted as if it were not
        made_by = known
    n = len(results)
    m = n + len(stays)
    return Graph(made_by, arrays, names[:n], names[n:m], names[m:])


def _names(results: list[mx.array]) -> list[str]:
    """What results are called: one that is there twice, the same."""
    first: dict[int, str] = {}
    return [first.setdefault(id(x), f"{NAMED}{i}") for i, x in enumerate(results)]


@contextlib.contextmanager
def _exportable() -> Iterator[None]:
    """MLX exports every operation but `contiguous`; meanwhile `sign`, which no model uses, stands for it."""
    contiguous = mx.contiguous
    mx.contiguous = lambda x, *args, **kwargs: mx.sign(x)  # type: ignore[assignment]
    try:
        yield
    finally:
        mx.contiguous = contiguous  # type: ignore[assignment]


def _unfused(build: Callable[[], Any]) -> Any:
    mx.disable_compile()
    try:
        return build()
    finally:
        mx.enable_compile()


def _structure(results: list[mx.array]) -> dict[str, Operation]:
    """The operations, by the arrays that they make; results are called by `_names`."""
    names = dict(zip(_names(results), results))
    first, *others = [list(names)[i : i + _MOST_NAMES] for i in range(0, len(names), _MOST_NAMES)]
    lines = _drawn(results, {name: names[name] for name in first})
    renamed: dict[str, str] = {}
    for batch in others:
        known = {name: names[name] for name in batch}
        for line, other in zip(lines, _drawn(results, known)):
            pairs = zip(_NAME.findall(line), _NAME.findall(other))
            renamed.update((mine, name) for mine, name in pairs if name in known)
    operations: dict[str, Operation] = {}
    made_by: dict[str, Operation] = {}
    for line in lines:
        if found := _NODE.match(line):
            name = "Contiguous" if found[2] == "Sign" else found[2].split()[0]
            operations[found[1]] = Operation(name)
        elif found := _READS.match(line):
            operations[found[2]].inputs.append(renamed.get(found[1], found[1]))
        elif found := _MAKES.match(line):
            name = renamed.get(found[2], found[2])
            operations[found[1]].outputs.append(name)
            made_by[name] = operations[found[1]]
    return made_by


def _drawn(results: list[mx.array], names: dict[str, mx.array]) -> list[str]:
    """The lines of a graph's drawing, of which MLX takes some names; the lines themselves are always the same."""
    text = io.StringIO()
    mx.export_to_dot(text, *results, **names)
    return text.getvalue().splitlines()


def _with_shapes(results: list[mx.array]) -> tuple[dict[str, Operation], dict[str, Any]]:
    """An unfused graph: its structure, with arguments, and its arrays."""
    made_by = _structure(results)
    exported, shapes, names = _exported(results)
    arrays: dict[str, Any] = {}
    todo = list(zip(_names(results), names))
    while todo:
        mine, theirs = todo.pop()
        if mine in arrays:
            continue
        arrays[mine] = shapes[theirs]
        operation = made_by.get(mine)
        if operation is None:
            continue
        if operation.name in PASSED_ON:
            todo.append((operation.inputs[0], theirs))
            continue
        other = exported[theirs]
        operation.arguments = other.arguments
        arrays.update((a, shapes[b]) for a, b in zip(operation.outputs, other.outputs))
        todo += zip(operation.inputs, other.inputs)
    return made_by, arrays


def _exported(results: list[mx.array]) -> tuple[dict[str, Operation], dict[str, Any], list[str]]:
    """Of the graph that `export_function` tells: operations by what they make, arrays, names of the results."""
    made_by: dict[str, Operation] = {}
    arrays: dict[str, tuple[tuple[int, ...], int]] = {}
    names: list[str] = []

    def note(told: list) -> list[str]:
        arrays.update((name, (tuple(shape), dtype.size)) for name, shape, dtype in told)
        return [name for name, *_ in told]

    def listen(told: dict) -> None:
        if told["type"] == "outputs":
            names.extend(note(told["outputs"]))
        elif told["type"] == "constants":
            note([(name, x.shape, x.dtype) for name, x in told["constants"]])
        elif told["type"] == "primitive":
            reads, makes = note(told["inputs"]), note(told["outputs"])
            operation = Operation(told["name"], reads, makes, told["arguments"])
            made_by.update(dict.fromkeys(makes, operation))

    mx.export_function(listen, lambda unused: results, mx.array(0))
    return made_by, arrays, names


def _carried_over(
    made_by: dict[str, Operation],
    plain: dict[str, Operation],
    arrays: dict[str, Any],
    names: list[str],
) -> dict[str, Any]:
    """The arrays of a fused graph, from those of the unfused one of results of the same `names`.

    Raises:
        LookupError: the two graphs can't be told to be alike.
    """
    found: dict[str, Any] = {}
    seen: set[str] = set()
    partly: set[Operation] = set()
    whole: set[Operation] = set()
    todo = list(zip(names, names))
    while todo:
        mine, theirs = todo.pop()
        if mine in seen:
            continue
        seen.add(mine)
        found[mine] = arrays[theirs]
        operation, other = made_by.get(mine), plain.get(theirs)
        if operation is None:
            continue
        if operation.name in PASSED_ON:
            within = other.inputs[0] if other and other.name in PASSED_ON else theirs
            todo.append((operation.inputs[0], within))
        elif other is not None and other.name in PASSED_ON:
            seen.remove(mine)
            todo.append((mine, other.inputs[0]))
        elif operation.name.startswith(FUSED):
            for name in operation.outputs:  # which are alike
                found.setdefault(name, arrays[theirs])
            if mine != operation.outputs[-1]:  # its parts are found from what it makes last
                partly.add(operation)
                continue
            whole.add(operation)
            constants = set(operation.inputs)
            for pair in fused_inputs(operation, theirs, plain, made_by):
                constants.discard(pair[0])
                todo.append(pair)
            found.update(dict.fromkeys(constants, _NUMBER))
        elif other is None or (operation.name, len(operation.inputs)) != (
            other.name,
            len(other.inputs),
        ):
            raise LookupError(operation.name)
        else:
            operation.arguments = other.arguments
            for a, b in zip(operation.outputs, other.outputs):
                found[a] = arrays[b]
            todo += zip(operation.inputs, other.inputs)
    if partly - whole:
        raise LookupError(FUSED)
    return found


def _in_large_stack(function: Callable[[], Any]) -> Any:
    """What a function gives, called where it may recurse deeply."""
    done: list[Any] = []

    def run() -> None:
        try:
            done.append((function(), None))
        except Exception as error:
            done.append((None, error))

    before = threading.stack_size(_STACK)
    try:
        thread = threading.Thread(target=run)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    result, error = done[0]
    if isinstance(error, ValueError) and "export_function" in str(error):
        raise SnapKVError(f"MLX can't tell what this model computes: {error}") from error
    if error is not None:
        raise error
    return result
