"""The decoding cache of a compressed prompt, its rows held with fewer bits."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .cache import SnapKVCache
from .errors import SnapKVError, UnsupportedModelError
from .models import AttentionLayer
from .quantization import BITS, Quantization, fitting_groups


class QuantizedSnapKVCache(SnapKVCache):
    """A `SnapKVCache` of quantised rows: fixed shape, one row written in place per decoded token.

    mlx-lm reads it with its quantised attention, which it chooses by `bits`.

    Args:
        cache: what to hold, not quantised yet.
        quantization: how to hold it.
    """

    def __init__(self, cache: SnapKVCache, quantization: Quantization):
        vars(self).update(vars(cache))
        self.quantization = quantization
        self.keys: Any = quantization.pack(cache.keys)
        self.values: Any = quantization.pack(cache.values)

    @property
    def bits(self) -> int:
        return self.quantization.bits

    @property
    def group_size(self) -> int:
        return self.quantization.group_size

    def update_and_fetch(self, keys: mx.array, values: mx.array):
        """Add `(B, n_kv_heads, L, head_dim)` keys and values; the quantised rows the attention is to see."""
        L, row = keys.shape[2], self.next_row
        new = (*self.quantization.pack(keys), *self.quantization.pack(values))
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
        return self.quantization.unpack(keys), self.quantization.unpack(values), positions

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
        *rest, bits, group_size = v
        self.quantization = Quantization(bits, group_size)
        SnapKVCache.state.fset(self, rest)  # type: ignore[attr-defined]
        self.keys, self.values = tuple(self.keys), tuple(self.values)


def quantize_rows(
    prompt_cache: list, layers: list[AttentionLayer], quantization: Quantization
) -> None:
    """Replace the compressed caches of `prompt_cache` by quantised ones, layer by layer."""
    for layer in layers:
        cache = layer.cache_in(prompt_cache)
        if isinstance(cache, SnapKVCache):
            small = QuantizedSnapKVCache(cache, quantization)
            mx.eval(small.keys, small.values)
            layer.put(prompt_cache, small)


def require_quantizable(
    model, layers: list[AttentionLayer], prompt_cache: list, quantization: Quantization
) -> None:
    """Find out before the prompt is read.

    Args:
        prompt_cache: fresh caches of the model; they are filled with one token.

    Raises:
        SnapKVError: the number of bits or the group size is not possible.
        UnsupportedModelError: mlx-lm's quantised attention does not serve the model.
    """
    if quantization.bits not in BITS:
        raise SnapKVError(f"kv_bits must be {', '.join(map(str, BITS))}, got {quantization.bits}")
    if any(layer.family.sinks for layer in layers):
        raise UnsupportedModelError(
            "mlx-lm's quantised attention has no attention sinks, which this model needs: drop kv_bits"
        )
    model(mx.zeros((1, 1), mx.int32), cache=prompt_cache)
    sizes = {
        rows.shape[3] for layer in layers for rows in layer.cache_in(prompt_cache).keys_and_values()
    }
    fitting = fitting_groups(sizes)
    if quantization.group_size not in fitting:
        raise SnapKVError(
            f"kv_group_size must be one of {fitting} for heads of size {sorted(sizes)}, "
            f"got {quantization.group_size}"
        )
