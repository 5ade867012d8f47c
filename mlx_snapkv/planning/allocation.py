"""What MLX's CPU backend allocates for each operation (mlx/backend/cpu and common, of MLX 0.32).

Most make a buffer of their result's size. Others only look at their input's buffer in another way, or write over an
input that nobody needs any more. On Metal the same operations share and give way by the same rules.
"""

from __future__ import annotations

from collections.abc import Callable

from . import layout as lay
from . import views
from .buffers import Array, gives_way, is_free
from .fusion import FUSED
from .step import Step

UNARY = """Abs ArcCos ArcCosh ArcSin ArcSinh ArcTan ArcTanh AsType BitwiseInvert Ceil Conjugate Cos Cosh Erf ErfInv Exp
Expm1 Floor Imag Log Log10 Log1p Log2 LogicalNot Negative Real Round Rsqrt Sigmoid Sin Sinh Sqrt Square Tan Tanh"""
BINARY = """Add ArcTan2 BitwiseAnd BitwiseOr BitwiseXor Divide Equal Greater GreaterEqual LeftShift Less LessEqual
LogAddExp LogicalAnd LogicalOr Maximum Minimum Multiply NaNEqual NotEqual Power Remainder RightShift Subtract"""
OVERWRITING = "SliceUpdate Scatter ScatterAxis MaskedScatter DynamicSliceUpdate Sort Partition"
COPYING = "QuantizedMatmul Quantize Scan CumSum CumProd CumMin CumMax CumLogaddexp"


def allocate(step: Step) -> None:
    """Have an operation make, share or write over its results' buffers."""
    name = step.operation.name
    rule = _fused if name.startswith(FUSED) else RULES.get(name, _plain)
    rule(step)


def _plain(step: Step) -> None:
    for array in step.outs:
        step.memory.own(array)
    step.n_tasks += 1


def _reshape(step: Step) -> None:
    made = lay.reshaped(step.first.layout, step.out.layout)
    if made is None:
        _plain(step)
    else:
        views.view(step, made)


def _as_bytes(step: Step) -> None:
    """The same bytes, read as numbers of another type."""
    a, out = step.first.layout, step.out.layout
    if not (a.item == out.item or a.row or (out.item < a.item and a.strides[-1] == 1)):
        return _plain(step)
    outer = tuple(x * a.item // out.item for x in a.strides[:-1])
    flags = a.contiguous, a.row, a.column
    n = a.n_stored * a.item // out.item
    return views.view(step, out.flagged(outer + a.strides[-1:], *flags, n))


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
    **_rules("Copy StopGradient Depends CustomTransforms", views.same),
    **_rules("Broadcast BroadcastAxes", views.broadcast),
    **_rules("Reshape Flatten Unflatten", _reshape),
    **_rules(UNARY, _unary),
    **_rules(BINARY, _binary),
    **_rules(OVERWRITING, _overwrite),
    **_rules("Matmul AddMM GatherMM", _matmul),
    **_rules(COPYING, _copying),
    "ExpandDims": views.expand_dims,
    "Squeeze": views.squeeze,
    "Transpose": views.transpose,
    "Slice": views.slice_,
    "AsStrided": views.as_strided,
    "Split": views.split,
    "View": _as_bytes,
    "Contiguous": _contiguous,
    "Full": _full,
    "Select": _select,
    "Softmax": _softmax,
    "GatherQMM": _gather_quantized,
    "Concatenate": _concatenate,
    "Convolution": _convolution,
}
