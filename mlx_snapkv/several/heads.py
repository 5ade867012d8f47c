"""What is computed over all of a layer's KV heads when each rank has some of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.nn.layers.distributed import QuantizedShardedToAllLinear, ShardedToAllLinear

from .ranks import ALONE, Ranks


@dataclass(frozen=True)
class Heads:
    """The ranks that share a layer's KV heads in contiguous slices. Everything it returns is lazy.

    Attributes:
        ranks: `ALONE` if all heads are here.
    """

    ranks: Ranks = ALONE

    def first(self, n_here: int) -> int:
        """The index, among all heads, of the first of `n_here` heads here."""
        return self.ranks.rank * n_here

    def mean(self, x: mx.array) -> mx.array:
        """The mean over all heads, `(B, 1, T)`, of `(B, n_kv_heads, T)`."""
        if self.ranks.size == 1:
            return x.mean(axis=1, keepdims=True)
        return self.ranks.sum(x.sum(axis=1, keepdims=True)) / (x.shape[1] * self.ranks.size)

    def max(self, x: mx.array) -> mx.array:
        """The element-wise maximum over all ranks of a result for the heads here."""
        return self.ranks.max(x)

    def sum(self, x: mx.array) -> mx.array:
        """The element-wise sum over all ranks of a sum over the heads here."""
        return self.ranks.sum(x)


ALL_HERE = Heads()


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


def of_heads_here(output: Any) -> Callable[[mx.array], mx.array]:
    """An output projection of the heads here only: without the other ranks' summands, or the bias added to the sum."""
    if isinstance(output, ShardedToAllLinear):
        return lambda x: x @ output["weight"].T
    if isinstance(output, QuantizedShardedToAllLinear):
        return lambda x: mx.quantized_matmul(
            x,
            output["weight"],
            scales=output["scales"],
            biases=output.get("biases"),
            transpose=True,
            group_size=output.group_size,
            bits=output.bits,
            mode=output.mode,
        )
    return output
