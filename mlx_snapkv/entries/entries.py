"""What one layer offers a policy."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from ..errors import SnapKVError
from .quantization import Quantization, Stored, arrays, each, n_rows, pack, unpack
from .selection import gather_rows


@dataclass
class Rows:
    """What one layer offers a policy.

    Attributes:
        stored_keys, stored_values: the layer's rows in order of position, as its cache stores them.
        queries: `(B, n_heads, n, head_dim)`, post-RoPE; None if none were observed.
        query_positions: the row of each of those `n` queries' own token; query `i` sees rows up to it.
        scale: what the attention multiplies its logits by.
        sinks: `(n_heads,)` logits of attention sinks: they take a share of the softmax but have no row.
        given_positions: uint32 `(B, n_kv_heads, T)`, the rows' positions in the prompt if some are missing.
        received: float32 `(B, n_kv_heads, T)`, the attention received so far, if it was counted.
        quantization: how the rows are stored.
    """

    stored_keys: Stored
    stored_values: Stored
    queries: mx.array | None = None
    query_positions: mx.array | None = None
    scale: float = math.nan
    sinks: mx.array | None = None
    given_positions: mx.array | None = None
    received: mx.array | None = None
    quantization: Quantization | None = None

    def __len__(self) -> int:
        return n_rows(self.stored_keys)

    @cached_property
    def keys(self) -> mx.array:
        """`(B, n_kv_heads, T, head_dim)`."""
        return unpack(self.stored_keys, self.quantization)

    @cached_property
    def values(self) -> mx.array:
        """`(B, n_kv_heads, T, head_dim)`."""
        return unpack(self.stored_values, self.quantization)

    @cached_property
    def votes(self) -> mx.array:
        """`attention_votes` of these rows, computed once."""
        from .attention import attention_votes

        return attention_votes(self)

    @cached_property
    def positions(self) -> mx.array:
        """uint32 `(B, n_kv_heads, T)`: the rows' positions in the prompt."""
        if self.given_positions is not None:
            return self.given_positions
        shape = arrays(self.stored_keys)[0].shape[:3]
        return mx.broadcast_to(mx.arange(shape[2], dtype=mx.uint32), shape)

    def taken(self, chosen: mx.array) -> Rows:
        """The chosen rows, uint32 `(B, n_kv_heads, n)`, computed; without queries."""
        stored = (self.stored_keys, self.stored_values)
        keys, values = (each(lambda part: gather_rows(part, chosen), x) for x in stored)
        positions = mx.take_along_axis(self.positions, chosen, axis=-1)
        received = self.received
        if received is not None:
            received = mx.take_along_axis(received, chosen, axis=-1)
            mx.eval(received)
        mx.eval(keys, positions)
        mx.eval(
            values
        )  # after the keys: rows that rest are read for it, which needs less memory one by one
        return Rows(
            keys,
            values,
            given_positions=positions,
            received=received,
            quantization=self.quantization,
        )

    def packed(self, quantization: Quantization | None) -> Rows:
        """The same rows, stored so; those that are already stay as they are."""
        if quantization == self.quantization:
            return self
        keys, values = (pack(x, quantization) for x in (self.keys, self.values))
        mx.eval(keys, values)
        return dataclasses.replace(
            self, stored_keys=keys, stored_values=values, quantization=quantization
        )

    def let_go(self) -> None:
        """Don't keep the rows alive any longer."""
        self.stored_keys = self.stored_values = None
        for name in ("keys", "values"):
            vars(self).pop(name, None)

    @property
    def observed(self) -> tuple[mx.array, mx.array]:
        """The queries and the rows of their own tokens.

        Raises:
            SnapKVError: none were observed.
        """
        if self.queries is None or self.query_positions is None:
            raise SnapKVError(
                "a layer's queries are missing: pass queries=, or prefill with mlx_snapkv.prefill"
            )
        return self.queries, self.query_positions
