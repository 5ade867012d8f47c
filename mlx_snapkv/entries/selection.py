"""Which entries stay: scores to positions. Pure functions of arrays, no model and no cache."""

import math

import mlx.core as mx

from ..errors import SnapKVError

GROUP = 2048  # scores that a GPU sorts in one step


def select_positions(scores: mx.array, *, n_sink: int, top_k: int, n_window: int) -> mx.array:
    """Sink | `top_k` best of the middle | recent window, as sorted positions.

    Of scores `(B, n_kv_heads, T)`, higher means keep, only the middle, `[n_sink, T - n_window)`, is ranked; ties go to
    the lower position.

    Returns:
        uint32 `(B, n_kv_heads, n)`, ascending and unique along the last axis, where `n` is
        `n_sink + top_k + n_window`, or `T` if that is smaller (then every entry is kept).
    """
    B, H, T = scores.shape
    if n_sink + top_k + n_window >= T:
        return mx.broadcast_to(mx.arange(T, dtype=mx.uint32), (B, H, T))
    end = T - n_window
    ends = mx.arange(n_sink, dtype=mx.uint32), mx.arange(end, T, dtype=mx.uint32)
    parts = [mx.broadcast_to(part, (B, H, part.size)) for part in ends]
    if top_k > 0:
        middle = top_positions(scores[..., n_sink:end], top_k) + n_sink
        parts.insert(1, middle.astype(mx.uint32))
    return mx.concatenate(parts, axis=-1)


def top_positions(scores: mx.array, k: int) -> mx.array:
    """The `k` highest of `(..., T)` scores, `0 < k <= T`, as ascending uint32 positions `(..., k)`.

    Exact under ties: everything above the k-th highest score, then its equals from the left. NaN is the lowest
    score there is, so that the result is well formed whatever the scores.
    """
    T = scores.shape[-1]
    scores = scores.astype(mx.float32)
    cost = mx.where(mx.isnan(scores), mx.inf, -scores)
    kth = mx.partition(cost, k - 1, axis=-1)[..., k - 1 : k]
    above = cost < kth
    equal = cost == kth
    spare = k - above.sum(axis=-1, keepdims=True)
    chosen = above | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= spare))
    ranked = mx.where(chosen, mx.arange(T, dtype=mx.uint32), mx.array(T, mx.uint32))
    return mx.sort(ranked, axis=-1)[..., :k]


def top_of_groups(scores: mx.array, k: int) -> mx.array:
    """About the `k` highest of `(..., T)` scores, unordered uint32 positions `(..., n_of_groups(T, k))`.

    Long rows are dealt out, like cards, to groups of at most `GROUP` scores, and each gives its best: neighbours are in
    different groups, so that a run of high scores is kept whole. A GPU sorts a group in one step.
    """
    T = scores.shape[-1]
    if k >= T:
        return mx.broadcast_to(mx.arange(T, dtype=mx.uint32), scores.shape)
    n_groups = math.ceil(T / GROUP)
    each = n_of_groups(T, k) // n_groups
    size = math.ceil(T / n_groups)
    padding = [(0, 0)] * (scores.ndim - 1) + [(0, size * n_groups - T)]
    dealt = mx.pad(-scores, padding, constant_values=mx.inf)
    dealt = mx.unflatten(dealt, -1, (size, n_groups)).swapaxes(-1, -2)
    best = mx.argpartition(dealt, each - 1, axis=-1)[..., :each].astype(mx.uint32)
    return (best * n_groups + mx.arange(n_groups, dtype=mx.uint32)[:, None]).flatten(-2)


def n_of_groups(T: int, k: int) -> int:
    """How many of `T` scores `top_of_groups` gives: `k` or all, or a multiple of the groups' number."""
    n_groups = math.ceil(T / GROUP)
    return T if k >= T else n_groups * max(1, k // n_groups)


def take_entries(buffer: mx.array, positions: mx.array) -> mx.array:
    """Entries `(B, n_kv_heads, n, D)` at `positions` `(B, n_kv_heads, n)` of a contiguous `(B, n_kv_heads, T, D)`."""
    # 2 to 6 times faster than to take them along an axis; a buffer that is not contiguous would be copied.
    B, H, T, D = buffer.shape
    rows = positions + mx.arange(0, B * H * T, T, dtype=mx.uint32).reshape(B, H, 1)
    return mx.take(buffer.reshape(-1, D), rows.flatten(), axis=0).reshape(B, H, -1, D)


def nan_scores() -> SnapKVError:
    return SnapKVError("the entries' scores contain NaN, so the model's attention produced NaN")
