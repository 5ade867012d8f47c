"""Keys turned on by a layer's own RoPE, as if they had come later."""

import mlx.core as mx

from .rope import Rope, amplitudes

AT_ONCE = 1 << 15  # entries: CUDA takes at most twice as many sequences in one call


def turn(rope: Rope, x: mx.array, steps: mx.array) -> mx.array:
    """`x`, which `rope` has turned, turned on by `steps` positions.

    Args:
        rope: a RoPE module of a model, called as `rope(x, offset)` with an offset for each sequence; one for which
            `composes` is true.
        x: `(B, n_heads, n, head_dim)`.
        steps: integers `(B, n_heads, n)`, at least 0.

    Returns:
        `x`'s shape and dtype; what is turned by 0 steps is as it was, bit for bit.
    """
    D = x.shape[-1]
    if not x.size:  # which CUDA takes no offsets for
        return x
    # An offset for all of a sequence would turn its second by one step more, and so on: each is one of its own.
    alone, by = x.astype(mx.float32).reshape(-1, 1, 1, D), steps.astype(mx.int32).reshape(-1)
    parts = (slice(i, i + AT_ONCE) for i in range(0, len(by), AT_ONCE))
    turned = mx.concatenate([rope(alone[part], by[part]) for part in parts]) / amplitudes(rope, D)
    return mx.where((steps > 0)[..., None], turned.reshape(x.shape).astype(x.dtype), x)


def composes(rope: Rope, head_dim: int, length: int) -> bool:
    """Whether turning twice is turning once by the sum, at positions beyond `length`."""
    x = mx.ones((1, 1, 1, head_dim))
    first, then = 2 * length, max(1, length // 2)
    try:
        twice = turn(rope, rope(x, first), mx.full((1, 1, 1), then))
        at_once = rope(x, first + then)
        error = mx.square(twice - at_once).mean() / mx.square(at_once).mean()
        return bool((error < 0.01).item())
    except (TypeError, ValueError):  # it takes no offset for each sequence
        return False
