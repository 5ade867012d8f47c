"""Find the positions of the highest scores, and gather entries at given positions."""

from functools import partial

import mlx.core as mx

MAGNITUDE_BITS = 0x7FFFFFFF  # all bits of a float except the sign
INFINITY_BITS = 0x7F800000  # bits of infinity; those of NaN are larger


def best_positions(scores: mx.array, k: int, first: int = 0) -> mx.array:
    """Return the positions of each head's `k` highest scores. Ties go to lower positions.

    Each score and its position are packed into one integer for sorting, with the score in the high bits.

    Args:
        scores: `(B, n_kv_heads, m)` float32, at most 0. Minus infinity and NaN rank last.
        k: number of positions, at least 1. If there are no more than `k` scores, all positions are returned.
        first: position of the first score.

    Returns: uint32 `(B, n_kv_heads, min(k, m))`, unordered.
    """
    m = scores.shape[-1]
    if k >= m:
        return mx.broadcast_to(mx.arange(first, first + m, dtype=mx.uint32), scores.shape)
    positions = mx.arange(first, first + m, dtype=mx.uint64)
    costs = _costs(mx.view(scores, mx.uint32), positions)
    return mx.partition(costs, k - 1, axis=-1)[..., :k].astype(mx.uint32)


@partial(mx.compile, shapeless=True)
def _costs(bits: mx.array, positions: mx.array) -> mx.array:
    """Pack scores and positions into uint64 costs. A higher score, or a lower position among ties, costs less."""
    # For floats of at most 0, the bits without the sign increase as the float decreases.
    costs = mx.minimum(bits & MAGNITUDE_BITS, INFINITY_BITS).astype(mx.uint64)
    return (costs << 32) | positions


def take_entries(buffers: tuple[mx.array, ...], positions: mx.array) -> list[mx.array]:
    """Return each buffer's entries at `positions` `(B, n_kv_heads, n)`, `(B, n_kv_heads, n, ...)` each.

    Buffers `(B, n_kv_heads, T, ...)` should be contiguous, or MLX will copy them.
    """
    # Taking from a flat array is 2 to 6 times faster than `take_along_axis`.
    B, H, T, _ = buffers[0].shape
    starts = mx.arange(0, B * H * T, T, dtype=mx.uint32).reshape(B, H, 1)
    row_numbers = (positions + starts).flatten()
    return [_take(x, row_numbers) for x in buffers]


def _take(buffer: mx.array, row_numbers: mx.array) -> mx.array:
    taken = mx.take(mx.flatten(buffer, 0, 2), row_numbers, axis=0)
    return mx.unflatten(taken, 0, (*buffer.shape[:2], -1))
