"""What is to be known of a layer's RoPE, of which nothing is known but that it can be called."""

import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx

Rope = Callable[..., mx.array]

# By the RoPE object's id and the head size: what the object does to the unit vectors. An object that is gone
# takes its probes with it.
_Probe = tuple[mx.array, mx.array, mx.array]
_probes: dict[tuple[int, int], tuple[Any, _Probe]] = {}


def undo_rope(rope: Rope | None, x: mx.array, offset: int | mx.array) -> mx.array:
    """What `rope` made `x` of.

    A rotation by an angle is undone by the same rotation between two reflections, so the object itself is
    called again, whatever its frequencies. A first call finds which dimensions it turns together, and what it
    multiplies them by.

    Args:
        rope: a RoPE module of a model, called as `rope(x, offset)`; None turned nothing.
        x: `(B, n_heads, n, head_dim)`, as the module returned it.
        offset: position of the first of the `n`.

    Returns:
        float32 `(B, n_heads, n, head_dim)`. A module whose angles depend on how many tokens it is given ("dynamic"
        ones do, beyond the length that the model was trained with) is undone as if it had been given these.
    """
    x = x.astype(mx.float32)
    if rope is None or not x.size:
        return x
    signs, power, _ = _probe(rope, x.shape[-1])
    return signs * rope(signs * x, offset) / power


def amplitudes(rope: Rope, head_dim: int) -> mx.array:
    """What a RoPE module multiplies the dimensions by, besides turning them: float32 `(head_dim,)`."""
    _, power, _ = _probe(rope, head_dim)
    return mx.sqrt(power)


def mean_rotation(rope: Rope | None, head_dim: int, start: int, n: int) -> mx.array:
    """The mean of the matrices that `rope` multiplies vectors by at the positions `[start, start + n)`.

    Args:
        rope: as of `undo_rope`.

    Returns:
        float32 `(head_dim, head_dim)`, for column vectors.
    """
    own = mx.eye(head_dim)
    if rope is None:
        return own
    signs, _, partners = _probe(rope, head_dim)
    # Two vectors tell all of it: the first of each pair in one, the second in the other.
    # Not broadcast: MLX's CUDA kernel would write all positions over each other.
    first = (signs < 0).astype(mx.float32)
    of_first, of_second = (
        rope(mx.contiguous(mx.broadcast_to(x, (1, 1, n, head_dim))), start)
        .mean(axis=2)
        .reshape(head_dim, 1)
        for x in (first, 1 - first)
    )
    is_first = first[:, None] > 0
    other = (partners[:, None] == mx.arange(head_dim)).astype(mx.float32)
    from_own = mx.where(is_first, of_first, of_second)
    from_other = mx.where(is_first, of_second, of_first)
    return from_own * own + from_other * other


def _probe(rope: Rope, head_dim: int) -> _Probe:
    """Of every dimension: -1 if it is the first of a pair that turns together, its squared amplitude, and its partner.

    Each is `(head_dim,)`, the first two float32. A dimension that never turns is its own partner.
    """
    key = (id(rope), head_dim)
    found = _probes.get(key)
    if found is not None and found[0]() is rope:
        return found[1]
    # At position 1 no angle is a multiple of pi but that of a dimension which never turns.
    turned = rope(mx.eye(head_dim)[:, None, None], 1).reshape(head_dim, head_dim)
    dims = mx.arange(head_dim)
    with_other = (turned != 0) & (dims[None] != dims[:, None])
    partners = mx.where(mx.any(with_other, axis=1), mx.argmax(with_other, axis=1), dims)
    signs = mx.where(partners > dims, -1.0, 1.0)
    power = (turned * turned).sum(axis=1)
    probe = signs, power, partners
    mx.async_eval(probe)  # so that what is remembered is no graph of this thread's
    try:
        owner = weakref.ref(rope, lambda _: _probes.pop(key, None))
    except TypeError:
        return probe
    _probes[key] = (owner, probe)
    return probe
