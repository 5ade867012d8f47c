"""Queries as they were before a layer's RoPE, of which nothing is known but that it can be called."""

import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx

Rope = Callable[..., mx.array]

# By the RoPE object's id and the head size: what the object does to the unit vectors. An object that is gone
# takes its probes with it.
_probes: dict[tuple[int, int], tuple[Any, mx.array, mx.array]] = {}


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
    if rope is None:
        return x
    signs, power = _probe(rope, x.shape[-1])
    return signs * rope(signs * x, offset) / power


def _probe(rope: Rope, head_dim: int) -> tuple[mx.array, mx.array]:
    """-1 for one dimension of each pair that turns together, and the squared amplitudes, float32 `(head_dim,)` each."""
    key = (id(rope), head_dim)
    found = _probes.get(key)
    if found is not None and found[0]() is rope:
        return found[1:]
    # At position 1 no angle is a multiple of pi but that of a dimension which never turns.
    turned = rope(mx.eye(head_dim)[:, None, None], 1).reshape(head_dim, head_dim)
    dims = mx.arange(head_dim)
    with_higher = (turned != 0) & (dims[None] > dims[:, None])
    signs = mx.where(mx.any(with_higher, axis=1), -1.0, 1.0)
    power = (turned * turned).sum(axis=1)
    mx.async_eval(signs, power)  # so that what is remembered is no graph of this thread's
    try:
        owner = weakref.ref(rope, lambda _: _probes.pop(key, None))
    except TypeError:
        return signs, power
    _probes[key] = (owner, signs, power)
    return signs, power
