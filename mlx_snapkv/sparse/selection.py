"""Find the positions of the highest scores, and gather entries by position."""

from functools import partial

import mlx.core as mx

MAGNITUDE_BITS = 0x7FFFFFFF  # a float's bits without the sign
INFINITY_BITS = 0x7F800000  # the bits of infinity; a NaN has larger bits


def best_positions(scores: mx.array, k: int, first: int = 0) -> mx.array:
    """Return the positions of the `k` highest scores of each head. Ties go to lower positions.

    Scores and positions are sorted as single integers, with the score in the high bits and the position in the low
    bits.

    Args:
        scores: `(B, n_kv_heads, m)` float32, at most 0; minus infinity and NaN come last.
        k: at least 1; if there are at most `k` scores, all positions are returned.
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
    """Return a uint64 cost for the bits of each score: a higher score or, among ties, a lower position costs less."""
    # The bits of a float that is at most 0, without the sign bit, increase as the float decreases.
    costs = mx.minimum(bits & MAGNITUDE_BITS, INFINITY_BITS).astype(mx.uint64)
    return (costs << 32) | positions


def take_entries(buffers: tuple[mx.array, ...], positions: mx.array) -> list[mx.array]:
    """Return the entries `(B, n_kv_heads, n, ...)` at `positions` `(B, n_kv_heads, n)` of each buffer.

    Buffers `(B, n_kv_heads, T, ...)` should be contiguous, because others are copied.
    """
    # This is 2 to 6 times faster than `take_along_axis`.
    B, H, T, _ = buffers[0].shape
    starts = mx.arange(0, B * H * T, T, dtype=mx.uint32).reshape(B, H, 1)
    row_numbers = (positions + starts).flatten()
    return [_take(x, row_numbers) for x in buffers]


def _take(buffer: mx.array, row_numbers: mx.array) -> mx.array:
    taken = mx.take(mx.flatten(buffer, 0, 2), row_numbers, axis=0)
    return mx.unflatten(taken, 0, (*buffer.shape[:2], -1))
