"""Which entries a token reads: about the best of many scores, in few operations, and the entries at places."""

import math
from functools import lru_cache

import mlx.core as mx

from .compiled import compiled

GROUP_SIZE = 2048  # scores that a GPU sorts in one step
PLACE_BITS = GROUP_SIZE - 1  # low bits of a cost, which are the place in a group
# The others, without the sign: of a float of 0 at most they rise as it falls.
COST_BITS = 0x7FFFFFFF - PLACE_BITS
INFINITE_COST = 0x7F800000  # the cost of minus infinity, and of NaN
PADDING_BITS = 0xFFFFFFFF  # bits where there is no score: behind all others


@compiled
def top_of_groups(scores: mx.array, k: int, first: int = 0, n: int = 0) -> mx.array:
    """About the `k` highest of a head's scores: `n_of_groups(m, k, n)` places, the first of which is `first`.

    Scores are 0 at most, and those of minus infinity, or NaN, are no candidates: they come last. They are compared by
    13 significant bits, ties go to lower places. Long rows are dealt out, like cards, to groups of at most `GROUP_SIZE`
    scores, and each gives its best: neighbours are in different groups, so that a run of high scores is kept whole. A
    GPU sorts a group in one step; a score's place in its group is the low bits of what is sorted.

    Args:
        scores: `(B, n_kv_heads, m)` float32.
        n: places there are, if more than `first + m`.

    Returns: uint32 `(B, n_kv_heads, k)`, unordered.
    """
    m = scores.shape[-1]
    stop = first + m
    n_groups = _groups(max(n, stop))
    size = math.ceil(max(n, stop) / n_groups)
    if n_of_groups(m, k, max(n, stop)) == m:
        return mx.broadcast_to(mx.arange(first, stop, dtype=mx.uint32), scores.shape)
    padding = [(0, 0), (0, 0), (first, n_groups * size - stop)]
    bits = mx.pad(
        mx.view(scores, mx.uint32), padding, constant_values=mx.array(PADDING_BITS, mx.uint32)
    )
    dealt = mx.unflatten(bits, -1, (size, n_groups))
    costs = _costs(dealt, counted(size)[:, None])
    each = max(1, k // n_groups)
    best = mx.partition(costs, each - 1, axis=-2)[..., :each, :]
    return _places(best, counted(n_groups), n_groups).flatten(-2)


def n_of_groups(m: int, k: int, n: int = 0) -> int:
    """How many places `top_of_groups` gives: all `m`, or a multiple of the groups' number, `k` if there is but one."""
    n_groups = _groups(max(m, n))
    return m if k >= m else min(m, n_groups * max(1, k // n_groups))


def _groups(n: int) -> int:
    return math.ceil(n / GROUP_SIZE)


def _costs(bits: mx.array, place: mx.array) -> mx.array:
    known = mx.minimum(bits & COST_BITS, INFINITE_COST)
    return mx.where(bits == PADDING_BITS, COST_BITS, known) | place


def _places(costs: mx.array, group: mx.array, n_groups: int) -> mx.array:
    return (costs & PLACE_BITS) * n_groups + group


@lru_cache(64)
def counted(n: int, step: int = 1) -> mx.array:
    """The first `n` multiples of `step`, uint32; a decoded token needs the same ones again and again."""
    found = mx.arange(0, n * step, step, dtype=mx.uint32)
    mx.eval(found)
    return found


@compiled
def take_entries(buffers: tuple[mx.array, ...], positions: mx.array) -> list[mx.array]:
    """Entries `(B, n_kv_heads, n, ...)` at `positions` `(B, n_kv_heads, n)` of contiguous `(B, n_kv_heads, T, ...)`."""
    # 2 to 6 times faster than to take them along an axis; a buffer that is not contiguous would be copied.
    B, H, T, _ = buffers[0].shape
    places = (positions + counted(B * H, T).reshape(B, H, 1)).flatten()
    return [_take(x, places) for x in buffers]


def _take(buffer: mx.array, places: mx.array) -> mx.array:
    taken = mx.take(mx.flatten(buffer, 0, 2), places, axis=0)
    return mx.unflatten(taken, 0, (*buffer.shape[:2], -1))
