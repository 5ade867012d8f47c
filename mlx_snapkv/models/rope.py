"""Invert and average the RoPE of a layer, given only a callable."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

Rope = Callable[..., mx.array]

PROBE = "_mlx_snapkv_probe"  # attribute of a RoPE object that stores its probes


@dataclass(frozen=True)
class Probe:
    """The effect of a RoPE object on the unit vectors, stored with the object.

    Attributes:
        signs: `(head_dim,)` float32, -1 for the first dimension of each pair that is rotated, otherwise 1.
        power: `(head_dim,)` float32, square of the factor that multiplies each dimension.
        partners: `(head_dim,)`, the other dimension of the pair; dimensions that are not rotated are their own
            partners.
    """

    signs: mx.array
    power: mx.array
    partners: mx.array


def undo_rope(rope: Rope | None, x: mx.array, offset: int | mx.array) -> mx.array:
    """Return the input of `rope(x, offset)`, given its result: float32 `(B, n_heads, n, head_dim)`.

    The inverse of a rotation is the same rotation between two reflections, so the object itself is called again,
    whatever its frequencies are. The first call finds the pairs of dimensions and the factor of each.

    Args:
        rope: the RoPE object; None returns `x`.
        x: the result, `(B, n_heads, n, head_dim)`.
        offset: position of the first of the `n` vectors, or one position per element of the batch.
    """
    x = x.astype(mx.float32)
    if rope is None or not x.size:
        return x
    probe = _probe(rope, x.shape[-1])
    return probe.signs * rope(probe.signs * x, offset) / probe.power


def mean_rotation(rope: Rope | None, head_dim: int, start: int, n: int) -> mx.array:
    """Average the rotation matrices of the positions `[start, start + n)`: float32 `(head_dim, head_dim)`.

    The matrix multiplies column vectors from the left.
    """
    if rope is None:
        return mx.eye(head_dim)
    probe = _probe(rope, head_dim)
    # Two vectors determine the matrix: one has the first dimension of each pair, the other the second. They are
    # contiguous, because MLX's CUDA kernel would write all positions of a broadcast to one address.
    first = (probe.signs < 0).astype(mx.float32)
    vectors = mx.broadcast_to(mx.stack([first, 1 - first])[:, None, None], (2, 1, n, head_dim))
    means = rope(mx.contiguous(vectors), start).mean(axis=2)
    from_first, from_second = means.reshape(2, head_dim, 1)
    # Each row has two nonzero columns: those of the dimension and of its partner.
    is_first = first[:, None] > 0
    from_own = mx.where(is_first, from_first, from_second)
    from_partner = mx.where(is_first, from_second, from_first)
    is_partner = (probe.partners[:, None] == mx.arange(head_dim)).astype(mx.float32)
    return from_own * mx.eye(head_dim) + from_partner * is_partner


def _probe(rope: Rope, head_dim: int) -> Probe:
    """Probe a RoPE object, once for each head size, and store the probe with the object."""
    probes = vars(rope).setdefault(PROBE, {})
    if head_dim not in probes:
        # At position 1 every angle is less than pi, so only dimensions that are never rotated do not change.
        rotated = rope(mx.eye(head_dim)[:, None, None], 1).reshape(head_dim, head_dim)
        dims = mx.arange(head_dim)
        is_partner = (rotated != 0) & (dims[None] != dims[:, None])
        partners = mx.where(mx.any(is_partner, axis=1), mx.argmax(is_partner, axis=1), dims)
        signs = mx.where(partners > dims, -1.0, 1.0)
        power = (rotated * rotated).sum(axis=1)
        probes[head_dim] = Probe(signs=signs, power=power, partners=partners)
        # Evaluated here, because other threads use the probe, too.
        mx.async_eval(signs, partners, power)
    return probes[head_dim]
