"""One ranking of numbers that lie on several ranks."""

import mlx.core as mx

from .ranks import Ranks


def largest(x: mx.array, k: int, ranks: Ranks) -> mx.array:
    """The `k`-th largest, from 1, of all ranks' float32 `(n,)`: a number between it and the next larger is as good.

    Each bit of it is found by counting, so that 32 numbers go from rank to rank, however many there are to rank.
    """
    if ranks.size == 1:
        return -mx.partition(-x, k - 1)[k - 1]
    order = _ordered(x)
    found = 0
    for bit in reversed(range(32)):
        tried = found | 1 << bit
        above = ranks.sum((order >= mx.array(tried, mx.uint32)).sum())
        if above.item() >= k:  # type: ignore[operator]
            found = tried
    return _number(found)


def _ordered(x: mx.array) -> mx.array:
    """uint32 in the order of float32 numbers."""
    bits = (x.astype(mx.float32) + 0.0).view(mx.uint32)
    return mx.where(bits >> 31 == 1, ~bits, bits | mx.array(1 << 31, mx.uint32))


def _number(order: int) -> mx.array:
    """The float32 number of that order."""
    bits = order & 0x7FFFFFFF if order >> 31 else ~order & 0xFFFFFFFF
    return mx.array([bits], mx.uint32).view(mx.float32)[0]
