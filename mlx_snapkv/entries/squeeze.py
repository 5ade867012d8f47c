"""Positions brought nearer to the end: runs stay together, and what lies between them is squeezed."""

import mlx.core as mx


def squeezed(positions: mx.array, end: int, span: int) -> mx.array:
    """Positions moved forward so that all are within `span` before `end`.

    Every step from one position to the next, and from the last one to `end`, is cut down to the largest length that
    fits, 1 at least. So the consecutive stay consecutive, and what is within the span already stays where it is.

    Args:
        positions: integers `(B, n_kv_heads, n)` below `end`, ascending and unique along the last axis.

    Returns:
        uint32 `(B, n_kv_heads, n)`, ascending and unique, none below its own position. If there are more than `span`,
        they are the last `n` before `end`.
    """
    n = positions.shape[2]
    last = mx.full((*positions.shape[:2], 1), end, mx.int32)
    steps = mx.diff(mx.concatenate([positions.astype(mx.int32), last], axis=2), axis=2)
    # If the shortest are k and sum up to s, the others may be (span - s) / (n - k) long, for one of these k.
    shortest = mx.sort(steps, axis=2)
    sums = mx.cumsum(shortest, axis=2)
    others = n - mx.arange(n, dtype=mx.int32)
    longest = ((span - (sums - shortest)) // others).max(axis=2, keepdims=True)
    cut = mx.minimum(steps, mx.maximum(longest, 1))
    steps = mx.where(sums[..., -1:] <= span, steps, cut)
    return (end - mx.cumsum(steps, axis=2, reverse=True)).astype(mx.uint32)


def looked_up(positions: mx.array, known: mx.array, found: mx.array) -> mx.array:
    """What `positions` were moved to, where `known` ones were to `found`; any others stay.

    Args:
        positions: uint32 `(B, n_kv_heads, m)`, in any order.
        known: uint32 `(B, n_kv_heads, n)`, ascending and unique.
        found: uint32 `(B, n_kv_heads, n)`.
    """
    n = known.shape[2]
    # Sorted together, every one comes behind the last of the known that is not above it.
    order = mx.argsort(mx.concatenate([2 * known, 2 * positions + 1], axis=2), axis=2)
    n_before = mx.cumsum((order < n).astype(mx.int32), axis=2)
    place = mx.take_along_axis(n_before, mx.argsort(order, axis=2)[..., n:], axis=2) - 1
    place = mx.maximum(place, 0)
    same = mx.take_along_axis(known, place, axis=2) == positions
    return mx.where(same, mx.take_along_axis(found, place, axis=2), positions)
