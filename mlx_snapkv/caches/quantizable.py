"""Whether a model's entries can be quantised so."""

from ..entries.quantization import BITS, Quantization, fitting_groups
from ..errors import SnapKVError, UnsupportedModelError
from .layers import AttentionLayer, token_caches


def head_sizes(model, layers: list[AttentionLayer]) -> set[int]:
    """Head sizes of the keys and values of a model's full-attention layers."""
    caches = token_caches(model)
    return {x.shape[3] for layer in layers for x in layer.cache_in(caches).keys_and_values()}


def require_quantised_attention(layers: list[AttentionLayer], remedy: str) -> None:
    """Raises: UnsupportedModelError: the model's forward pass in mlx-lm reads plain entries only."""
    for layer in layers:
        plain_only = layer.family.plain_only
        why = plain_only and plain_only(list(layer.readers))
        if why:
            raise UnsupportedModelError(f"{why}: {remedy}")


def require_quantizable(model, layers: list[AttentionLayer], quantization: Quantization) -> None:
    """Find out before the prompt is read.

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
    require_quantised_attention(layers, "drop kv_bits")
    sizes = head_sizes(model, layers)
    fitting = fitting_groups(sizes, "kv_bits")
    if quantization.group_size not in fitting:
        raise SnapKVError(
            f"kv_group_size must be one of {fitting} for heads of size {sorted(sizes)}, "
            f"got {quantization.group_size}"
        )
