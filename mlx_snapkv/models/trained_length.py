"""The length for which a model was trained, according to its configuration."""

import warnings
from collections.abc import Mapping
from typing import Any

from ..errors import TrainedLengthWarning


def trained_length(model) -> int | None:
    """Return `max_position_embeddings` of a configuration, or the length to which a scaled RoPE extends it.

    Return None if mlx-lm's arguments of the family omit it. A linear factor is ignored: some configurations include it
    in the length and some do not, and nothing distinguishes them.
    """
    args = getattr(model, "args", None)
    for config in (args, _field(args, "text_config")):
        length = _field(config, "max_position_embeddings")
        if isinstance(length, int) and length > 0:
            extended = [_extended(length, scaling) for scaling in _scalings(config)]
            return max(length, *extended)
    return None


def beyond_trained_length(model, n_tokens: int) -> str | None:
    """Return a warning if a prompt of `n_tokens` exceeds the length for which the model was trained, otherwise None."""
    length = trained_length(model)
    if length is None or n_tokens <= length:
        return None
    return (
        f"{n_tokens} tokens are more than the model's trained length of {length}: answers may be wrong; if the model "
        "supports it, rope_scaling in its config.json (YaRN, for example) extends that length"
    )


def warn_beyond_trained_length(model, n_tokens: int) -> None:
    """Warn a Python caller if a prompt of `n_tokens` exceeds the length for which the model was trained."""
    if (sentence := beyond_trained_length(model, n_tokens)) is not None:
        warnings.warn(sentence, TrainedLengthWarning, stacklevel=3)


def _scalings(config: Any) -> list[Any]:
    """Return the scalings of a configuration under the name of mlx-lm or transformers 5. There may be several."""
    scaling = _field(config, "rope_scaling") or _field(config, "rope_parameters")
    values = scaling.values() if isinstance(scaling, Mapping) else ()
    by_layer_type = [value for value in values if isinstance(value, Mapping)]
    return by_layer_type or [scaling]


def _extended(length: int, scaling: Any) -> int:
    """Return the length to which a scaling extends `length`."""
    original = _field(scaling, "original_max_position_embeddings")
    factor = _field(scaling, "factor")
    kind = _field(scaling, "rope_type") or _field(scaling, "type")
    # LLaMA 3's factor scales wavelengths, and its max_position_embeddings are the full length.
    if not factor or not original or kind == "llama3":
        return length
    return int(original * factor)


def _field(config: Any, name: str) -> Any:
    """Return a value of a configuration, which may be a mapping or an object; None if it is missing."""
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
