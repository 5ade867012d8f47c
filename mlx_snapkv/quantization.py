"""Rows with fewer bits, in the form that mlx-lm's quantised attention reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .errors import SnapKVError

BITS = (2, 3, 4, 6, 8)
GROUP_SIZES = (32, 64, 128)

# Packed values, scales and biases, as `mx.quantize` makes them: `(B, n_kv_heads, T, ...)` each.
Parts = tuple[mx.array, mx.array, mx.array]


@dataclass(frozen=True)
class Quantization:
    """How rows are quantised.

    Attributes:
        bits: per value, 2, 3, 4, 6 or 8.
        group_size: values that share a scale and a bias; it divides the head size.
    """

    bits: int
    group_size: int

    def pack(self, rows: mx.array) -> Parts:
        """Rows `(B, n_kv_heads, T, head_dim)`, quantised."""
        return tuple(mx.quantize(rows, group_size=self.group_size, bits=self.bits))  # type: ignore[return-value]

    def unpack(self, parts: Any) -> mx.array:
        """Rows `(B, n_kv_heads, T, head_dim)` of the scales' dtype, as the attention sees them."""
        packed, scales, biases = parts
        return mx.dequantize(packed, scales, biases, group_size=self.group_size, bits=self.bits)


def fitting_groups(head_sizes: Iterable[int]) -> list[int]:
    """The group sizes that divide all head sizes.

    Raises:
        SnapKVError: there are none.
    """
    sizes = sorted(set(head_sizes))
    fitting = [g for g in GROUP_SIZES if all(size % g == 0 for size in sizes)]
    if not fitting:
        raise SnapKVError(
            f"quantised rows need heads of a size that 32 divides, and this model's are {sizes}: leave them unquantised"
        )
    return fitting
