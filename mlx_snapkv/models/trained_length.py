"""The context length that a model was trained for, according to its configuration."""

import warnings
from collections.abc import Mapping
from typing import Any

from ..errors import TrainedLengthWarning


def trained_length(model) -> int | None:
    """Return the model's trained length in tokens: `max_position_embeddings`, possibly extended by RoPE scaling.

    Return None if the family's arguments in mlx-lm don't include a length. A linear scaling factor is ignored because
    some configurations include it in the length and others don't, and there is no way to tell them apart.
    """
    args = getattr(model, "args", None)
    for config in (args, _field(args, "text_config")):
        length = _field(config, "max_position_embeddings")
        if isinstance(length, int) and length > 0:
            extended = [_extended(length, scaling) for scaling in _scalings(config)]
            return max(length, *extended)
    return None


def beyond_trained_length(model, n_tokens: int) -> str | None:
    """Return a warning if a prompt of `n_tokens` exceeds the model's trained length, otherwise None."""
    length = trained_length(model)
    if length is None or n_tokens <= length:
        return None
    return (
        f"{n_tokens} tokens are more than the model's trained length of {length}: answers may be wrong; if the model "
        "supports it, rope_scaling in its config.json (YaRN, for example) extends that length"
    )


def warn_beyond_trained_length(model, n_tokens: int) -> None:
    """Issue a Python warning if a prompt of `n_tokens` exceeds the model's trained length."""
    if (sentence := beyond_trained_length(model, n_tokens)) is not None:
        warnings.warn(sentence, TrainedLengthWarning, stacklevel=3)


def _scalings(config: Any) -> list[Any]:
    """Return a configuration's RoPE scalings, one per layer type if they differ.

    mlx-lm calls them `rope_scaling`, and transformers 5 `rope_parameters`.
    """
    scaling = _field(config, "rope_scaling") or _field(config, "rope_parameters")
    values = scaling.values() if isinstance(scaling, Mapping) else ()
    by_layer_type = [value for value in values if isinstance(value, Mapping)]
    return by_layer_type or [scaling]


def _extended(length: int, scaling: Any) -> int:
    """Return `length` as extended by a RoPE scaling."""
    original = _field(scaling, "original_max_position_embeddings")
    factor = _field(scaling, "factor")
    kind = _field(scaling, "rope_type") or _field(scaling, "type")
    # LLaMA 3's factor scales wavelengths, and its max_position_embeddings is already the full length.
    if not factor or not original or kind == "llama3":
        return length
    return int(original * factor)


def _field(config: Any, name: str) -> Any:
    """Return a value from a configuration, which may be a mapping or an object, or None if it is missing."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
