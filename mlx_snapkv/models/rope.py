"""Invert and average RoPE rotations, given only a RoPE callable."""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

Rope = Callable[..., mx.array]

PROBE = "_mlx_snapkv_probe"  # attribute that stores a RoPE object's probes


@dataclass(frozen=True)
class Probe:
    """How a RoPE object pairs and scales dimensions, measured on the unit vectors.

    Attributes:
        signs: `(head_dim,)` float32, -1 for the first dimension of each rotated pair, otherwise 1.
        power: `(head_dim,)` float32, squared scale factor of each dimension.
        partners: `(head_dim,)`, the index of the other dimension in each dimension's pair. A dimension that is not
            rotated is its own partner.
    """

    signs: mx.array
    power: mx.array
    partners: mx.array


def undo_rope(rope: Rope | None, rotated: mx.array, offset: int) -> mx.array:
    """Undo RoPE: return the float32 `x` with `rope(x, offset) == rotated`.

    A rotation is undone by the same rotation between two reflections. So calling the RoPE object is enough, and its
    frequencies need not be known. The first call for each head size probes how the object pairs and scales dimensions.

    Args:
        rope: the RoPE object. If None, `rotated` is only converted to float32.
        rotated: rotated vectors, `(B, n_heads, n, head_dim)`.
        offset: position of the first of the `n` vectors.
    """
    rotated = rotated.astype(mx.float32)
    if rope is None or rotated.size == 0:
        return rotated
    probe = _stored_probe(rope, rotated.shape[-1])
    reflected = probe.signs * rotated
    return probe.signs * rope(reflected, offset) / probe.power


def mean_rotation(rope: Rope | None, head_dim: int, start: int, n: int) -> mx.array:
    """Return the mean of RoPE's rotation matrices at positions `[start, start + n)`.

    The mean is a float32 matrix, `(head_dim, head_dim)`, that multiplies column vectors from the left. If `rope` is
    None, it is the identity matrix.
    """
    if rope is None:
        return mx.eye(head_dim)
    probe = _stored_probe(rope, head_dim)
    # Two vectors determine the whole matrix. The first vector has ones in the first dimension of each pair, and the
    # second vector has ones in all other dimensions. Both are copied to every position, because MLX's CUDA kernel would
    # write the results for all positions of a broadcast array to the same address.
    first_of_pairs = (probe.signs < 0).astype(mx.float32)
    two_vectors = mx.stack([first_of_pairs, 1 - first_of_pairs])[:, None, None]
    at_all_positions = mx.contiguous(mx.broadcast_to(two_vectors, (2, 1, n, head_dim)))
    mean_rotated = rope(at_all_positions, start).mean(axis=2)
    from_first, from_second = mean_rotated.reshape(2, head_dim, 1)
    # Each row has at most two nonzero columns: the dimension itself and its partner.
    is_first = first_of_pairs[:, None] > 0
    diagonal = mx.where(is_first, from_first, from_second)
    partner_column = mx.where(is_first, from_second, from_first)
    is_partner = (probe.partners[:, None] == mx.arange(head_dim)).astype(mx.float32)
    return diagonal * mx.eye(head_dim) + partner_column * is_partner


def _stored_probe(rope: Rope, head_dim: int) -> Probe:
    """Return a RoPE object's probe. It is measured once per head size and stored on the object."""
    probes = vars(rope).setdefault(PROBE, {})
    if head_dim not in probes:
        probes[head_dim] = _measure_probe(rope, head_dim)
    return probes[head_dim]


def _measure_probe(rope: Rope, head_dim: int) -> Probe:
    """Rotate the unit vectors to find how the RoPE object pairs and scales dimensions."""
    unit_vectors = mx.eye(head_dim)[:, None, None]
    # At position 1, every rotation angle is between 0 and pi. Its sine is not 0, so each rotated unit vector has a
    # nonzero element at its partner.
    rotated = rope(unit_vectors, 1).reshape(head_dim, head_dim)
    dims = mx.arange(head_dim)
    is_partner = (rotated != 0) & (dims[None] != dims[:, None])
    has_partner = mx.any(is_partner, axis=1)
    partners = mx.where(has_partner, mx.argmax(is_partner, axis=1), dims)
    signs = mx.where(partners > dims, -1.0, 1.0)
    power = (rotated * rotated).sum(axis=1)
    # Other threads will use these arrays, so evaluate them here.
    mx.async_eval(signs, partners, power)
    return Probe(signs=signs, power=power, partners=partners)
