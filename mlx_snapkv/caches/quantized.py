"""The caches of ours with rows of fewer bits, which mlx-lm reads with its quantised attention."""

from __future__ import annotations

import mlx.core as mx

from ..caches.layers import AttentionLayer
from ..entries.quantization import BITS, Quantization, Stored, fitting_groups
from ..errors import SnapKVError, UnsupportedModelError
from .block import BlockKVCache
from .reselecting import ReselectingSnapKVCache
from .window import SnapKVCache


class QuantizedCache:
    """What makes a cache one of quantised rows: mlx-lm chooses its quantised attention by `bits`.

    Args:
        quantization: how the rows given are quantised, and those to come will be.
        *args, **rest: the other class's.
    """

    keys: Stored
    values: Stored
    quantization: Quantization | None

    def __init__(self, *args, quantization: Quantization, **rest):
        self.quantization = quantization
        super().__init__(*args, **rest)

    @property
    def bits(self) -> int:
        assert self.quantization is not None
        return self.quantization.bits

    @property
    def group_size(self) -> int:
        assert self.quantization is not None
        return self.quantization.group_size

    @property
    def state(self) -> tuple:
        return (*super().state, self.bits, self.group_size)  # type: ignore[misc]

    @state.setter
    def state(self, v) -> None:
        *rest, bits, group_size = v
        self.quantization = Quantization(bits, group_size)
        super(QuantizedCache, type(self)).state.fset(self, rest)  # type: ignore[misc]
        self.keys, self.values = tuple(self.keys), tuple(self.values)


class QuantizedSnapKVCache(QuantizedCache, SnapKVCache):
    """A `SnapKVCache` of quantised rows: fixed shape, one row written in place per decoded token."""


class QuantizedReselectingSnapKVCache(QuantizedCache, ReselectingSnapKVCache):
    """A `ReselectingSnapKVCache` of quantised rows, which are moved as they are, never quantised again."""


class QuantizedBlockKVCache(QuantizedCache, BlockKVCache):
    """A `BlockKVCache` of quantised rows, which are moved as they are, never quantised again."""


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
    fitting = fitting_groups(sizes, "kv_bits")
    if quantization.group_size not in fitting:
        raise SnapKVError(
            f"kv_group_size must be one of {fitting} for heads of size {sorted(sizes)}, "
            f"got {quantization.group_size}"
        )
