"""What a fused operation was made of."""

from __future__ import annotations

from collections.abc import Iterator

from .operation import Operation

FUSED = "Compiled"  # then the names of the operations that it is made of, in the order of their computation
NAMED = "o"  # begins the names of results, which MLX's own are in capitals beside
PASSED_ON = ("Copy", "StopGradient")  # make nothing of their own
_SILENT = "Broadcast"  # is in one of the two graphs at will


def fused_inputs(
    fused: Operation, result: str, plain: dict[str, Operation], made_by: dict[str, Operation]
) -> list[tuple[str, str]]:
    """What a fused operation reads, each with its counterpart in the unfused graph; constants are left out.

    Args:
        result: what it makes last, in the unfused graph.
        plain, made_by: the unfused and the fused graph.

    Raises:
        LookupError: the parts can't be found in the unfused graph, or not for certain.
    """
    mine = [x for x in fused.inputs if not _is_constant(x, made_by)]
    label = fused.name[len(FUSED) :].replace("BroadcastAxes", "").replace(_SILENT, "")
    for found in _parsed(result, plain, label):
        theirs = [x for x in found if not _is_constant(x, plain)]
        pairs = list(zip(mine, theirs))
        if len(theirs) == len(mine) and all(
            _may_be_alike(made_by.get(a), plain.get(b)) for a, b in pairs
        ):
            return pairs
    raise LookupError(fused.name)


def _may_be_alike(mine: Operation | None, theirs: Operation | None) -> bool:
    """Whether an operation of the fused graph may have made what one of the unfused graph makes."""
    if mine is None or theirs is None or theirs.name in PASSED_ON or mine.name in PASSED_ON:
        return mine is theirs or (mine is not None and theirs is not None)
    return mine.name == theirs.name or mine.name.startswith(FUSED)


def _is_constant(name: str, made_by: dict[str, Operation]) -> bool:
    """Whether nothing makes it and it was not given a name: numbers in a formula."""
    return name not in made_by and not name.startswith(NAMED)


def _parsed(result: str, plain: dict[str, Operation], label: str) -> Iterator[list[str]]:
    """What lies around the operations of `label`, the last of which makes `result`, in the order of the first use.

    A fused operation's parts are in post-order: what an operation reads, from the first to the last, then itself. Each
    array on the way is either made within, if the label goes on with its operation, or read from outside.
    """
    State = tuple[str, tuple[str, ...], frozenset[str]]  # rest of the label, outside, visited
    deepest = sum(letter.isupper() for letter in label)  # at most so many operations

    def visit(name: str, state: State, depth: int = 0) -> Iterator[State]:
        rest, outside, seen = state
        if name in seen:
            yield state
            return
        operation = plain.get(name)
        if operation is not None and operation.name.startswith(_SILENT):
            for left, out, known in visit(operation.inputs[0], state, depth):
                yield left, out, known | {name}
            return
        if operation is not None and operation.name in rest and depth < deepest:
            states: Iterator[State] = iter([(rest, outside, seen | {name})])
            for child in operation.inputs:
                states = then(states, child, depth + 1)
            for left, out, known in states:
                if left.startswith(operation.name):
                    yield left[len(operation.name) :], out, known
        if depth:
            yield rest, (*outside, name), seen | {name}

    def then(states: Iterator[State], child: str, depth: int) -> Iterator[State]:
        for state in states:
            yield from visit(child, state, depth)

    for rest, outside, _ in visit(result, (label, (), frozenset())):
        if not rest:
            yield list(outside)
