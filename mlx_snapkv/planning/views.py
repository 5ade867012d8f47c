"""Operations whose results are their inputs' buffers, looked at in another way."""

from __future__ import annotations

from . import layout as lay
from .step import Step


def view(step: Step, layout: lay.Layout) -> None:
    step.memory.share(step.out, step.first, layout)


def same(step: Step) -> None:
    """The results are inputs: the first of them, or the last ones."""
    last = step.operation.name == "CustomTransforms"
    ins = step.ins[-len(step.outs) :] if last else step.ins
    for array, other in zip(step.outs, ins):
        step.memory.share(array, other)


def broadcast(step: Step) -> None:
    view(step, lay.spread(step.first.layout, step.out.layout))


def expand_dims(step: Step) -> None:
    strides = list(step.first.layout.strides)
    for axis in step.operation.arguments[0]:
        strides.insert(axis, 1)
    view(step, lay.with_strides(step.first.layout, step.out.layout, tuple(strides)))


def squeeze(step: Step) -> None:
    gone = step.operation.arguments[0]
    strides = tuple(x for i, x in enumerate(step.first.layout.strides) if i not in gone)
    view(step, lay.with_strides(step.first.layout, step.out.layout, strides))


def transpose(step: Step) -> None:
    axes = step.operation.arguments[0]
    view(step, lay.transposed(step.first.layout, step.out.layout, axes))


def slice_(step: Step) -> None:
    if not step.out.layout.size:
        return step.own()
    steps = step.operation.arguments[2]
    strides = tuple(x * n for x, n in zip(step.first.layout.strides, steps))
    return view(step, lay.strided(step.out.layout, strides))


def as_strided(step: Step) -> None:
    view(step, lay.strided(step.out.layout, tuple(step.operation.arguments[1])))


def split(step: Step) -> None:
    for array in step.outs:
        step.memory.share(array, step.first, lay.part(step.first.layout, array.layout))
