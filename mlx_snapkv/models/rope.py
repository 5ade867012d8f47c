"""A layer's RoPE, of which only the call is known: undone and averaged."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

Rope = Callable[..., mx.array]

PROBE = "_mlx_snapkv_probe"


@dataclass(frozen=True)
class Probe:
    """What a RoPE object does to the unit vectors, kept with the object; `(head_dim,)` each."""

    signs: mx.array  # float32, -1 for the first dimension of a pair that turns together
    power: mx.array  # float32, the squared amplitude
    partners: mx.array  # the dimension that it turns with; one that never turns is its own partner


def undo_rope(rope: Rope | None, x: mx.array, offset: int | mx.array) -> mx.array:
    """The input of `rope(x, offset)`, float32, from its result `x` `(B, n_heads, n, head_dim)`; None turned nothing.

    A rotation by an angle is undone by the same rotation between two reflections, so the object itself is called again,
    whatever its frequencies. A first call finds which dimensions it turns together, and what it multiplies them by.
    """
    x = x.astype(mx.float32)
    if rope is None or not x.size:
        return x
    probe = _probe(rope, x.shape[-1])
    return probe.signs * rope(probe.signs * x, offset) / probe.power


def mean_rotation(rope: Rope | None, head_dim: int, start: int, n: int) -> mx.array:
    """The mean, float32 `(head_dim, head_dim)`, of what `rope` multiplies column vectors by at `[start, start + n)`."""
    if rope is None:
        return mx.eye(head_dim)
    probe = _probe(rope, head_dim)
    # Two vectors tell all of it: the first of each pair in one, the second in the other.
    # Not broadcast: MLX's CUDA kernel would write all positions over each other.
    first = (probe.signs < 0).astype(mx.float32)
    vectors = mx.broadcast_to(mx.stack([first, 1 - first])[:, None, None], (2, 1, n, head_dim))
    of_first, of_second = rope(mx.contiguous(vectors), start).mean(axis=2).reshape(2, head_dim, 1)
    is_first = first[:, None] > 0
    other = (probe.partners[:, None] == mx.arange(head_dim)).astype(mx.float32)
    from_own = mx.where(is_first, of_first, of_second)
    from_other = mx.where(is_first, of_second, of_first)
    return from_own * mx.eye(head_dim) + from_other * other


def _probe(rope: Rope, head_dim: int) -> Probe:
    probes = vars(rope).setdefault(PROBE, {})
    if head_dim not in probes:
        # At position 1 no angle is a multiple of pi but that of a dimension which never turns.
        turned = rope(mx.eye(head_dim)[:, None, None], 1).reshape(head_dim, head_dim)
        dims = mx.arange(head_dim)
        with_other = (turned != 0) & (dims[None] != dims[:, None])
        partners = mx.where(mx.any(with_other, axis=1), mx.argmax(with_other, axis=1), dims)
        signs = mx.where(partners > dims, -1.0, 1.0)
        probes[head_dim] = Probe(signs, (turned * turned).sum(axis=1), partners)
        mx.async_eval(signs, partners, probes[head_dim].power)  # no graph of this thread's is kept
    return probes[head_dim]
