"""What ranks compute together from the KV heads that each of them has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx.nn.layers.distributed import QuantizedShardedToAllLinear, ShardedToAllLinear

from .ranks import Ranks


def largest(x: mx.array, k: int, ranks: Ranks) -> mx.array:
    """The `k`-th largest, from 1, of all ranks' float32 `(n,)`, or a number between it and the next larger one.

    Each of its bits is found by counting: the ranks exchange 32 numbers, however many there are to rank.
    """
    if ranks.size == 1:
        return -mx.partition(-x, k - 1)[k - 1]
    order = _ordered(x)
    found = 0
    for bit in reversed(range(32)):
        tried = found | 1 << bit
        if ranks.sum((order >= mx.array(tried, mx.uint32)).sum()).item() >= k:  # type: ignore[operator]
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


def of_heads_here(output: Any) -> Callable[[mx.array], mx.array]:
    """An output projection of this rank's heads only: without the other ranks' summands and the bias."""
    if isinstance(output, ShardedToAllLinear):
        return lambda x: x @ output["weight"].T
    if isinstance(output, QuantizedShardedToAllLinear):
        how: Any = {"group_size": output.group_size, "bits": output.bits, "mode": output.mode}
        parts = output["weight"], output["scales"], output.get("biases")
        return lambda x: mx.quantized_matmul(x, *parts, transpose=True, **how)
    return output
