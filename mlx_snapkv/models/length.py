"""How many positions a model was trained to."""

from collections.abc import Mapping
from typing import Any


def trained_length(model) -> int | None:
    """The `max_position_embeddings` of a model's configuration, or what it extends them to by a scaled RoPE.

    None if it does not tell, as with families whose arguments in mlx-lm leave it out.
    """
    args = getattr(model, "args", None)
    for config in (args, _of(args, "text_config")):
        length = _of(config, "max_position_embeddings")
        if isinstance(length, int) and length > 0:
            return max(length, _extended(config))
    return None


def _extended(config: Any) -> int:
    scaling = _of(config, "rope_scaling") or _of(config, "rope_parameters")
    original, factor = _of(scaling, "original_max_position_embeddings"), _of(scaling, "factor")
    return int(original * factor) if original and factor else 0


def _of(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
