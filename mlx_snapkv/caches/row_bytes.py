"""How a layer's keys or values lie in a file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..entries.quantization import Quantization, Stored, arrays, pack, unpack


@dataclass(frozen=True)
class RowBytes:
    """Token after token, `(B, n_kv_heads)` rows: numbers as they are, or quantised ones with scales and biases.

    Attributes:
        heads: `(B, n_kv_heads)`.
        parts: of a row, the arrays that it is stored in: their dtypes and last dimensions.
        row_as_read: bytes of a row as it is given back.
        quantization: how rows are quantised, if they are.
    """

    heads: tuple[int, ...]
    parts: tuple[tuple[mx.Dtype, int], ...]
    row_as_read: int
    quantization: Quantization | None

    @classmethod
    def of(cls, like: mx.array, quantization: Quantization | None) -> RowBytes:
        """Of rows such as `like`, `(B, n_kv_heads, T, head_dim)`."""
        parts = arrays(pack(like[:, :, :1], quantization))
        stored = tuple((x.dtype, x.shape[-1]) for x in parts)
        return cls(like.shape[:2], stored, like.dtype.size * like.shape[3], quantization)

    @property
    def row(self) -> int:
        """Bytes of a row."""
        return sum(dtype.size * width for dtype, width in self.parts)

    @property
    def token(self) -> int:
        """Bytes of a token's rows."""
        return math.prod(self.heads) * self.row

    @property
    def token_as_read(self) -> int:
        """Bytes of a token's rows as they are given back."""
        return math.prod(self.heads) * self.row_as_read

    def laid_out(self, stored: Stored) -> mx.array:
        """Rows `(B, n_kv_heads, n, head_dim)`, quantised if they are to be, as uint8 `(n, B, n_kv_heads, row)`."""
        parts = [mx.contiguous(x.transpose(2, 0, 1, 3)).view(mx.uint8) for x in arrays(stored)]
        return mx.concatenate(parts, axis=-1)

    def unpacked(self, data: np.ndarray) -> mx.array:
        """Rows `(B, n_kv_heads, n, head_dim)` of bytes `(B, n_kv_heads, n, row)`."""
        return unpack(self.stored(data), self.quantization)

    def stored(self, data: np.ndarray) -> Stored:
        """The same, quantised ones as they are."""
        whole = mx.array(data)
        parts: list[Any] = []
        start = 0
        for dtype, width in self.parts:
            stop = start + dtype.size * width
            parts.append(mx.contiguous(whole[..., start:stop]).view(dtype))
            start = stop
        return parts[0] if self.quantization is None else tuple(parts)
