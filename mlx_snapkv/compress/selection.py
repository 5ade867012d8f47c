"""Select which entries to keep, given their scores."""

import mlx.core as mx

from ..entries.quota import Quota


def select(scores: mx.array, quota: Quota) -> mx.array:
    """Select the sink, the highest-scoring entries in the middle, and the recent window.

    Args:
        scores: `(B, n_kv_heads, T)`, higher means keep. Only the middle, `[n_sink, T - n_window)`, is ranked. Ties go
            to lower indices.
        quota: number of entries to keep.

    Returns:
        Indices of the selected entries, uint32 `(B, n_kv_heads, n)`, unique and ascending along the last axis, where
        `n` is `min(quota.entries, T)`.
    """
    B, H, T = scores.shape
    if quota.entries >= T:
        return mx.broadcast_to(mx.arange(T, dtype=mx.uint32), (B, H, T))
    window_start = T - quota.n_window
    sink = mx.broadcast_to(mx.arange(quota.n_sink, dtype=mx.uint32), (B, H, quota.n_sink))
    window = mx.broadcast_to(mx.arange(window_start, T, dtype=mx.uint32), (B, H, quota.n_window))
    top_k = quota.entries - quota.n_sink - quota.n_window
    if top_k <= 0:
        return mx.concatenate([sink, window], axis=-1)
    best = top_positions(scores[..., quota.n_sink : window_start], top_k) + quota.n_sink
    return mx.concatenate([sink, best.astype(mx.uint32), window], axis=-1)


def top_positions(scores: mx.array, k: int) -> mx.array:
    """Return the positions of the `k` highest scores, sorted by position, uint32 `(..., k)`.

    Ties go to lower positions. NaN ranks lowest, so the result is valid for any scores.

    Args:
        scores: `(..., T)`.
        k: number of positions, `0 < k <= T`.
    """
    T = scores.shape[-1]
    scores = scores.astype(mx.float32)
    costs = mx.where(mx.isnan(scores), mx.inf, -scores)
    kth_cost = mx.partition(costs, k - 1, axis=-1)[..., k - 1 : k]
    is_better = costs < kth_cost
    is_tied = costs == kth_cost
    n_tied_chosen = k - is_better.sum(axis=-1, keepdims=True)
    tied_so_far = mx.cumsum(is_tied.astype(mx.int32), axis=-1)
    is_chosen = is_better | (is_tied & (tied_so_far <= n_tied_chosen))
    # Write the chosen positions to indices 0 to k - 1, in order, and all others to index k, which is cut off.
    n_chosen_so_far = mx.cumsum(is_chosen.astype(mx.int32), axis=-1)
    target_indices = mx.where(is_chosen, n_chosen_so_far - 1, k)
    positions = mx.broadcast_to(mx.arange(T, dtype=mx.uint32), scores.shape)
    output = mx.zeros((*scores.shape[:-1], k + 1), mx.uint32)
    return mx.put_along_axis(output, target_indices, positions, axis=-1)[..., :k]
