"""The decoding cache of a compressed prompt, its rows held with fewer bits."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .cache import SnapKVCache
from .errors import SnapKVError, UnsupportedModelError
from .models import AttentionLayer

BITS = (2, 3, 4, 6, 8)
# Packed values, scales and biases, as `mx.quantize` makes them.
Rows = tuple[mx.array, mx.array, mx.array]


class QuantizedSnapKVCache(SnapKVCache):
    """A `SnapKVCache` of quantised rows: fixed shape, one row written in place per decoded token.

    mlx-lm reads it with its quantised attention, which it chooses by `bits`.

    Args:
        cache: what to hold, not quantised yet.
        bits: per value, 2, 3, 4, 6 or 8.
        group_size: values that share a scale and a bias; it divides the head size.
    """

    def __init__(self, cache: SnapKVCache, *, bits: int, group_size: int):
        vars(self).update(vars(cache))
        self.bits = bits
        self.group_size = group_size
        self.keys: Any = self._quantized(cache.keys)
        self.values: Any = self._quantized(cache.values)

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        """Add `(B, n_kv_heads, L, head_dim)` keys and values; the quantised rows the attention is to see."""
        L, row = keys.shape[2], self.next_row
        new = (*self._quantized(keys), *self._quantized(values))
        if L == 1 and row is not None:
            for held, one in zip((*self.keys, *self.values), new):
                held[..., row : row + 1, :] = one
            self.take_step(self.keys, self.values)
        else:
            self._keep_newest(self.n_window - 1)
            held = (*self.keys, *self.values)
            joined = [mx.concatenate(list(pair), axis=2) for pair in zip(held, new)]
            self.keys, self.values = tuple(joined[:3]), tuple(joined[3:])
            self.offset += L
            self._trimmable = L
        return self.keys, self.values

    def in_order(self) -> tuple[mx.array, mx.array, mx.array]:
        """Keys and values, no longer quantised, and positions of all rows, in order of position."""
        keys, values, positions = super().in_order()
        return self._dequantized(keys), self._dequantized(values), positions

    def size(self) -> int:
        return self.keys[0].shape[2]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*self.keys, *self.values))

    @property
    def state(self) -> tuple:
        return (*super().state, self.bits, self.group_size)

    @state.setter
    def state(self, v) -> None:
        *rest, self.bits, self.group_size = v
        SnapKVCache.state.fset(self, rest)  # type: ignore[attr-defined]
        self.keys, self.values = tuple(self.keys), tuple(self.values)

    def _quantized(self, rows: mx.array) -> Rows:
        return tuple(mx.quantize(rows, group_size=self.group_size, bits=self.bits))  # type: ignore[return-value]

    def _dequantized(self, rows: Any) -> mx.array:
        packed, scales, biases = rows
        return mx.dequantize(packed, scales, biases, group_size=self.group_size, bits=self.bits)


def quantize_rows(
    prompt_cache: list, layers: list[AttentionLayer], bits: int, group_size: int
) -> None:
    """Replace the compressed caches of `prompt_cache` by quantised ones, layer by layer."""
    for layer in layers:
        cache = layer.cache_in(prompt_cache)
        if isinstance(cache, SnapKVCache):
            small = QuantizedSnapKVCache(cache, bits=bits, group_size=group_size)
            mx.eval(small.keys, small.values)
            layer.put(prompt_cache, small)


def require_quantizable(
    model, layers: list[AttentionLayer], prompt_cache: list, bits: int, group_size: int
) -> None:
    """Find out before the prompt is read.

    Args:
        prompt_cache: fresh caches of the model; they are filled with one token.

    Raises:
        SnapKVError: the number of bits or the group size is not possible.
        UnsupportedModelError: mlx-lm's quantised attention does not serve the model.
    """
    if bits not in BITS:
        raise SnapKVError(f"kv_bits must be {', '.join(map(str, BITS))}, got {bits}")
    if any(layer.family.sinks for layer in layers):
        raise UnsupportedModelError(
            "mlx-lm's quantised attention has no attention sinks, which this model needs: drop kv_bits"
        )
    model(mx.zeros((1, 1), mx.int32), cache=prompt_cache)
    sizes = {
        rows.shape[3] for layer in layers for rows in layer.cache_in(prompt_cache).keys_and_values()
    }
    fitting = [g for g in (32, 64, 128) if all(size % g == 0 for size in sizes)]
    if not fitting:
        raise SnapKVError(
            f"kv_bits needs heads of a size that 32 divides, and this model's are {sorted(sizes)}: drop it"
        )
    if group_size not in fitting:
        raise SnapKVError(
            f"kv_group_size must be one of {fitting} for heads of size {sorted(sizes)}, got {group_size}"
        )
