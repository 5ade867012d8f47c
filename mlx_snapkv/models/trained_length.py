"""The context length that a model was trained for, according to its configuration."""

import warnings
from collections.abc import Mapping
from typing import Any

from ..errors import TrainedLengthWarning


def trained_length(model) -> int | None:
    """Return the model's trained length in tokens: `max_position_embeddings`, possibly extended by RoPE scaling.

    Return None if the model's arguments in mlx-lm don't include a length. A linear scaling factor is ignored, because
    only some configurations have already multiplied the length by it, and there is no way to tell which.
    """
    model_config = getattr(model, "args", None)
    text_config = _value_in(model_config, "text_config")
    for config in (model_config, text_config):
        length = _value_in(config, "max_position_embeddings")
        has_length = isinstance(length, int) and length > 0
        if has_length:
            scaled_lengths = [_scaled_length(length, scaling) for scaling in _rope_scalings(config)]
            return max(length, *scaled_lengths)
    return None


def beyond_trained_length(model, n_tokens: int) -> str | None:
    """Return a warning if a prompt of `n_tokens` tokens exceeds the model's trained length, otherwise None."""
    length = trained_length(model)
    if length is None or n_tokens <= length:
        return None
    return (
        f"{n_tokens} tokens are more than the model's trained length of {length}: answers may be wrong; if the model "
        "supports it, rope_scaling in its config.json (YaRN, for example) extends that length"
    )


def warn_beyond_trained_length(model, n_tokens: int) -> None:
    """Issue a Python warning if a prompt of `n_tokens` tokens exceeds the model's trained length."""
    warning = beyond_trained_length(model, n_tokens)
    if warning is not None:
        warnings.warn(warning, TrainedLengthWarning, stacklevel=3)


def _rope_scalings(config: Any) -> list[Any]:
    """Return a configuration's RoPE scalings, one per layer type if the layer types have their own.

    The key is `rope_scaling` in mlx-lm's configurations, and `rope_parameters` in transformers 5.
    """
    scaling = _value_in(config, "rope_scaling") or _value_in(config, "rope_parameters")
    # `scaling` is one scaling, or a mapping from layer types to scalings.
    values = scaling.values() if isinstance(scaling, Mapping) else ()
    scaling_by_layer_type = [value for value in values if isinstance(value, Mapping)]
    return scaling_by_layer_type or [scaling]


def _scaled_length(length: int, scaling: Any) -> int:
    """Return `length`, extended by the given RoPE scaling."""
    original_length = _value_in(scaling, "original_max_position_embeddings")
    factor = _value_in(scaling, "factor")
    rope_type = _value_in(scaling, "rope_type") or _value_in(scaling, "type")
    # LLaMA 3's factor scales wavelengths, and its max_position_embeddings is already the full length.
    if not factor or not original_length or rope_type == "llama3":
        return length
    return int(original_length * factor)


def _value_in(config: Any, name: str) -> Any:
    """Return a value from a configuration (a mapping or an object), or None if it is missing."""
    if isinstance(config, Mapping):
        return config.get(name)
    return getattr(config, name, None)
