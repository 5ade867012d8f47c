"""Find the positions of the highest scores."""

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
    n_scores = scores.shape[-1]
    if k >= n_scores:
        all_positions = mx.arange(first, first + n_scores, dtype=mx.uint32)
        return mx.broadcast_to(all_positions, scores.shape)
    positions = mx.arange(first, first + n_scores, dtype=mx.uint64)
    score_bits = mx.view(scores, mx.uint32)
    costs = _costs(score_bits, positions)
    lowest_costs = mx.partition(costs, k - 1, axis=-1)[..., :k]
    return lowest_costs.astype(mx.uint32)  # keeps the low 32 bits, which are the positions


@partial(mx.compile, shapeless=True)
def _costs(score_bits: mx.array, positions: mx.array) -> mx.array:
    """Pack scores and positions into uint64 costs. A higher score, or a lower position among ties, costs less."""
    # If a float is at most 0, its magnitude bits increase as it decreases.
    score_costs = mx.minimum(score_bits & MAGNITUDE_BITS, INFINITY_BITS).astype(mx.uint64)
    return (score_costs << 32) | positions
