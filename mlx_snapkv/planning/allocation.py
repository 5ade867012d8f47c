"""What MLX's CPU backend allocates for each operation (mlx/backend/cpu and common, of MLX 0.32).

Most make a buffer of their result's size. Others only look at their input's buffer in another way, or write over an
input that nobody needs any more. On Metal the same operations share and give way by the same rules.
"""

from __future__ import annotations

from collections.abc import Callable

from . import layout as lay
from .buffers import Array, Buffer, Memory, gives_way, is_free
from .fusion import FUSED
from .operation import Operation

UNARY = """Abs ArcCos ArcCosh ArcSin ArcSinh ArcTan ArcTanh AsType BitwiseInvert Ceil Conjugate Cos Cosh Erf ErfInv Exp
Expm1 Floor Imag Log Log10 Log1p Log2 LogicalNot Negative Real Round Rsqrt Sigmoid Sin Sinh Sqrt Square Tan Tanh"""
BINARY = """Add ArcTan2 BitwiseAnd BitwiseOr BitwiseXor Divide Equal Greater GreaterEqual LeftShift Less LessEqual
LogAddExp LogicalAnd LogicalOr Maximum Minimum Multiply NaNEqual NotEqual Power Remainder RightShift Subtract"""
OVERWRITING = "SliceUpdate Scatter ScatterAxis MaskedScatter DynamicSliceUpdate Sort Partition"
COPYING = "QuantizedMatmul Quantize Scan CumSum CumProd CumMin CumMax CumLogaddexp"


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

    def run(self) -> None:
        name = self.operation.name
        if name.startswith(FUSED):
            _fused(self)
        else:
            RULES.get(name, _plain)(self)

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


def _plain(step: Step) -> None:
    for array in step.outs:
        step.memory.own(array)
    step.n_tasks += 1


def _view(step: Step, layout: lay.Layout) -> None:
    step.memory.share(step.out, step.first, layout)


def _same(step: Step) -> None:
    """The results are inputs: the first of them, or the last ones."""
    last = step.operation.name == "CustomTransforms"
    ins = step.ins[-len(step.outs) :] if last else step.ins
    for array, other in zip(step.outs, ins):
        step.memory.share(array, other)


def _broadcast(step: Step) -> None:
    _view(step, lay.spread(step.first.layout, step.out.layout))


def _expand_dims(step: Step) -> None:
    strides = list(step.first.layout.strides)
    for axis in step.operation.arguments[0]:
        strides.insert(axis, 1)
    _view(step, lay.with_strides(step.first.layout, step.out.layout, tuple(strides)))


def _squeeze(step: Step) -> None:
    gone = step.operation.arguments[0]
    strides = tuple(x for i, x in enumerate(step.first.layout.strides) if i not in gone)
    _view(step, lay.with_strides(step.first.layout, step.out.layout, strides))


def _transpose(step: Step) -> None:
    axes = step.operation.arguments[0]
    _view(step, lay.transposed(step.first.layout, step.out.layout, axes))


def _slice(step: Step) -> None:
    if not step.out.layout.size:
        return step.own()
    steps = step.operation.arguments[2]
    strides = tuple(x * n for x, n in zip(step.first.layout.strides, steps))
    return _view(step, lay.strided(step.out.layout, strides))


def _as_strided(step: Step) -> None:
    _view(step, lay.strided(step.out.layout, tuple(step.operation.arguments[1])))


def _split(step: Step) -> None:
    for array in step.outs:
        step.memory.share(array, step.first, lay.part(step.first.layout, array.layout))


def _reshape(step: Step) -> None:
    made = lay.reshaped(step.first.layout, step.out.layout)
    if made is None:
        _plain(step)
    else:
        _view(step, made)


def _as_bytes(step: Step) -> None:
    """The same bytes, read as numbers of another type."""
    a, out = step.first.layout, step.out.layout
    if not (a.item == out.item or a.row or (out.item < a.item and a.strides[-1] == 1)):
        return _plain(step)
    outer = tuple(x * a.item // out.item for x in a.strides[:-1])
    flags = a.contiguous, a.row, a.column
    n = a.n_stored * a.item // out.item
    return _view(step, out.flagged(outer + a.strides[-1:], *flags, n))


def _contiguous(step: Step) -> None:
    if step.first.layout.row and step.first.buffer.n_bytes <= step.out.layout.n_bytes + 16384:
        step.memory.share(step.out, step.first)
    else:
        _plain(step)


def _full(step: Step) -> None:
    a = step.first
    if a.layout.n_stored == 1 or not a.layout.contiguous:
        return _plain(step)
    return _unary(step)


def _over(step: Step, array: Array) -> None:
    """A result in an input's order, over it if possible."""
    if not step.take(array):
        step.own(array.layout)


def _unary(step: Step) -> None:
    if step.first.layout.contiguous:
        _over(step, step.first)
    else:
        step.own()
    step.n_tasks += 1


def _binary(step: Step) -> None:
    first, second = step.ins
    a, b = first.layout, second.layout
    step.n_tasks += 1
    if a.n_stored == b.n_stored == 1:
        step.own(a)
    elif a.n_stored == 1 and b.contiguous:
        _over(step, second)
    elif b.n_stored == 1 and a.contiguous:
        _over(step, first)
    elif (a.row and b.row) or (a.column and b.column):
        if not step.take(first, second):
            step.own(a)
    else:
        size = step.out.layout.size
        whole = [x for x in step.ins if x.layout.row and x.layout.size == size]
        if not step.take(*whole):
            step.own()


def _select(step: Step) -> None:
    layouts = [array.layout for array in step.ins]
    step.n_tasks += 1
    if all(x.n_stored == 1 for x in layouts):
        step.own(layouts[1])
    elif all(x.row for x in layouts) or all(x.column for x in layouts):
        if not step.take(*step.ins):
            step.own(layouts[1])
    elif not step.take(*(x for x in step.ins if x.layout.row)):
        step.own()


def _softmax(step: Step) -> None:
    a = step.first.layout
    step.n_tasks += 1
    if not (a.contiguous and a.strides[-1] == 1):
        step.own()
        step.n_tasks += 1
    elif is_free(step.first):
        step.memory.share(step.out, step.first)
    else:
        step.own(a)


def _overwrite(step: Step) -> None:
    """A copy of the first input, or itself, of which a part is then written."""
    name, a = step.operation.name, step.first.layout
    if name == "SliceUpdate" and not step.ins[1].layout.size:
        return step.memory.share(step.out, step.first)
    vector = a.contiguous and a.size == a.n_stored != 1
    step.n_tasks += 1 + (name == "DynamicSliceUpdate")
    if not (vector and step.take(step.first)):
        step.own()
        step.n_tasks += 1
    return None


def _matmul(step: Step) -> None:
    added = step.ins[2] if step.operation.name == "AddMM" else None
    if added is not None and added.layout.row and added.layout.n_stored != 1:
        step.n_tasks += not gives_way(added, step.out)
        _over(step, added)
    else:
        step.own()
        step.n_tasks += added is not None
    for array in step.ins[:2]:
        if not array.layout.is_matrix:
            step.copy(array)
    step.n_tasks += 1


def _gather_quantized(step: Step) -> None:
    for array in step.ins[:4]:
        a = array.layout
        if len(a.shape) > 1 and a.strides[-2:] != (a.shape[-1], 1):
            step.copy(array)
    _plain(step)


def _copying(step: Step) -> None:
    for array in step.ins:
        if not array.layout.row:
            step.copy(array)
    _plain(step)


def _concatenate(step: Step) -> None:
    step.own()
    step.n_tasks += len(step.ins)


def _convolution(step: Step) -> None:
    """Along one axis: a padded copy, one with a kernel's inputs beside each other, and float32 forms."""
    step.own()
    array, weight = (x.layout for x in step.ins)
    step.n_tasks += 1
    if len(array.shape) != 3:
        return
    low, high = (sum(n) for n in step.operation.arguments[1:3])
    batch, length, channels = array.shape
    sizes = [
        batch * (length + low + high) * channels,
        batch * step.out.layout.shape[1] * weight.shape[1] * channels,
    ]
    if weight.shape[2] != channels or weight.item != 4 or not weight.row:
        sizes.append(weight.size)
    if step.out.layout.item != 4:
        sizes.append(step.out.layout.size)
    step.temporary += [step.memory.new(4 * size) for size in sizes]
    step.n_tasks += len(sizes) + 1


def _fused(step: Step) -> None:
    sizes = {x.layout.size for x in step.ins if x.layout.size > 1}
    alike = all(x.layout.row for x in step.ins) or all(x.layout.column for x in step.ins)
    step.n_tasks += 1
    rest = [x for x in step.ins if x.layout.size > 1]
    for array in step.outs:
        size = array.layout.size
        fitting = (x for x in rest if alike or (x.layout.row and x.layout.size == size))
        over = next((x for x in fitting if gives_way(x, array)), None)
        if over is not None:
            step.memory.share(array, over)
            rest.remove(over)
        else:
            like = rest[0].layout if rest and alike and sizes == {size} else None
            step.memory.own(array, like)


def _rules(names: str, rule: Callable[[Step], None]) -> dict[str, Callable[[Step], None]]:
    return dict.fromkeys(names.split(), rule)


RULES: dict[str, Callable[[Step], None]] = {
    **_rules("Copy StopGradient Depends CustomTransforms", _same),
    **_rules("Broadcast BroadcastAxes", _broadcast),
    **_rules("Reshape Flatten Unflatten", _reshape),
    **_rules(UNARY, _unary),
    **_rules(BINARY, _binary),
    **_rules(OVERWRITING, _overwrite),
    **_rules("Matmul AddMM GatherMM", _matmul),
    **_rules(COPYING, _copying),
    "ExpandDims": _expand_dims,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Slice": _slice,
    "AsStrided": _as_strided,
    "Split": _split,
    "View": _as_bytes,
    "Contiguous": _contiguous,
    "Full": _full,
    "Select": _select,
    "Softmax": _softmax,
    "GatherQMM": _gather_quantized,
    "Concatenate": _concatenate,
    "Convolution": _convolution,
}
