"""Translate transformers 5's `rope_parameters` to the names that mlx-lm reads.

Most model families in mlx-lm 0.32.2 read only `rope_theta` and `rope_scaling`. If both are missing, LLaMA silently
falls back to a base of 10,000 and Qwen2 to a base of 1,000,000, and both generate nonsense. Qwen3-Next fails. Delete
this file and its tests once mlx-lm reads `rope_parameters` for every family, as it already does for Qwen3.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from mlx_lm.models.base import BaseModelArgs
from mlx_lm.utils import _get_classes

from ..errors import SnapKVError
from .table import ROTARY_TAIL, SUPPORTED

ROPE_PARAMETERS = "rope_parameters"
PARTIAL_FACTOR = "partial_rotary_factor"
ORIGINAL_LENGTH = "original_max_position_embeddings"
LOCAL_BASE = "local rope_theta"  # our name for the base of sliding-window layers
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
# Parameter -> its possible names in mlx-lm's configurations.
CONFIG_NAMES = {
    "rope_theta": ("rope_theta", "rotary_emb_base"),
    PARTIAL_FACTOR: (PARTIAL_FACTOR, "rotary_pct", "rotary_dim"),
    ORIGINAL_LENGTH: (ORIGINAL_LENGTH,),
    LOCAL_BASE: ("rope_local_base_freq", "swa_rope_theta", "rope_local_theta"),
}
# Families that read rope_theta elsewhere in the configuration (attn_config).
READ_THETA_ELSEWHERE = ("dbrx",)
# Family -> the partial_rotary_factor hard-coded in mlx-lm.
HARD_CODED_FACTORS = {"recurrent_gemma": 0.5}
# Families whose sliding-window layers use the full-attention layers' base, but no scaling.
UNSCALED_SLIDING = ("olmo3",)


@dataclass(frozen=True)
class UnreadParameters:
    """RoPE parameters that mlx-lm would not read.

    Attributes:
        changes: configuration entries to pass as mlx-lm's `model_config`.
        values: the parameters under mlx-lm's names.
    """

    changes: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return one line of text for the user: the values, and where they come from."""
        descriptions: list[str] = []
        for name, value in self.values.items():
            is_scaling = isinstance(value, Mapping)
            descriptions.append(
                f"{name} ({value['rope_type']})" if is_scaling else f"{name}={value}"
            )
        return f"{', '.join(descriptions)} from {ROPE_PARAMETERS}, which mlx-lm does not read for this model type"


def unread_parameters(config: Any) -> UnreadParameters:
    """Return the RoPE parameters that mlx-lm needs under other names. Most configurations have none.

    Raises: SnapKVError: `rope_parameters` is not an object, or it has values that mlx-lm's implementation of the model
        can't represent. If such a model were loaded anyway, it would generate nonsense.
    """
    # A model_file brings its own code, which may read rope_parameters.
    if not isinstance(config, Mapping) or "model_file" in config:
        return UnreadParameters()
    try:
        model_class, args_class = _get_classes(dict(config))
    except (KeyError, ValueError):  # mlx-lm reports these when it loads the model
        return UnreadParameters()
    family = args_class.__module__.removeprefix("mlx_lm.models.")
    # Multimodal models keep their language model's configuration in `text_config`.
    reads_text_config = "text_config" in _field_names(args_class)
    is_nested = reads_text_config and "text_config" in config
    text_config = config["text_config"] if is_nested else config
    text_args_class = args_class
    if reads_text_config:
        text_args_class = _text_args_class(family, model_class, text_config)
    has_rope_parameters = isinstance(text_config, Mapping) and text_config.get(ROPE_PARAMETERS)
    if text_args_class is None or not has_rope_parameters:
        return UnreadParameters()
    field_names = _field_names(text_args_class)
    if not _needs_other_names(family, field_names):
        return UnreadParameters()
    changes = _renamed_rope_parameters(family, text_config, field_names)
    values = {name: value for name, value in changes.items() if value is not None}
    if is_nested:
        changes = {"text_config": {**text_config, **changes}}
    return UnreadParameters(changes=changes, values=values)


def _field_names(args_class: Any) -> Collection[str]:
    """Return the configuration keys that mlx-lm's `from_dict` reads."""
    return inspect.signature(args_class).parameters


def _text_args_class(family: str, model_class: type, text_config: Any) -> Any:
    """Return the class that a family builds from its `text_config`, or None if it is unknown."""
    for cls in model_class.__mro__:
        for name, value in vars(sys.modules[cls.__module__]).items():
            is_args_class = isinstance(value, type) and issubclass(value, BaseModelArgs)
            if is_args_class and name.startswith("Text"):  # such as TextConfig
                return value
    modules = [attention_family.module for attention_family in SUPPORTED.get(family, ())]
    if not modules:
        return None
    model_type = text_config.get("model_type") if isinstance(text_config, Mapping) else None
    module = model_type if model_type in modules else modules[0]
    return import_module(f"mlx_lm.models.{module}").ModelArgs


def _needs_other_names(family: str, field_names: Collection[str]) -> bool:
    """Return whether a family needs the RoPE parameters under other names.

    A family does not need them if it has no RoPE, reads `rope_parameters`, or reads `rope_theta` from another part of
    the configuration.
    """
    attention_families = SUPPORTED.get(family, ())
    may_have_rope = not attention_families or any(
        attention_family.rope is not None for attention_family in attention_families
    )
    reads_parameters = ROPE_PARAMETERS in field_names or family in READ_THETA_ELSEWHERE
    return may_have_rope and not reads_parameters


def _renamed_rope_parameters(
    family: str, config: Mapping[str, Any], field_names: Collection[str]
) -> dict[str, Any]:
    """Return the values of `rope_parameters` under mlx-lm's names, as entries to add to `config`.

    All names are among `field_names`, the keys that mlx-lm reads.

    Raises: SnapKVError: `rope_parameters` is not an object, or it has values that mlx-lm's implementation can't
        represent.
    """
    parameters = _without_layer_types(family, config[ROPE_PARAMETERS], field_names)
    changes: dict[str, Any] = {}
    for name, possible_names in CONFIG_NAMES.items():
        value = parameters.get(name)
        if value is None:
            continue
        present_names = [field_name for field_name in possible_names if field_name in field_names]
        if not present_names:
            if _is_needed(name, value, family, field_names):
                raise _refusal_error(family, f"no {name}")
            continue
        field_name = present_names[0]
        if config.get(field_name) is None:
            # `rotary_dim` is a number of dimensions, while transformers stores a fraction.
            is_dimension = field_name == "rotary_dim"
            changes[field_name] = int(_head_dim(config) * value) if is_dimension else value
    return changes | _rope_scaling(family, config, parameters, field_names)


def _is_needed(name: str, value: Any, family: str, field_names: Collection[str]) -> bool:
    """Return whether a family without a field for the parameter `name` would compute RoPE incorrectly."""
    if name == PARTIAL_FACTOR:
        # A family with a rotary tail reads the tail's size from its configuration. The others have a hard-coded
        # fraction, mostly 1.
        return ROTARY_TAIL not in field_names and value != HARD_CODED_FACTORS.get(family, 1)
    return name == "rope_theta"


def _head_dim(config: Mapping[str, Any]) -> int:
    """Return the head size that a configuration defines."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _rope_scaling(
    family: str,
    config: Mapping[str, Any],
    parameters: Mapping[str, Any],
    field_names: Collection[str],
) -> dict[str, Any]:
    """Return the `rope_scaling` entry to add to `config`, or an empty dict if none is needed.

    Raises: SnapKVError: the RoPE is scaled, but the family has no field for the scaling.
    """
    if config.get("rope_scaling") is not None:
        return {}
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type == "default":
        # Pass None for a missing key, because some of mlx-lm's argument classes require a value.
        needs_a_value = "rope_scaling" in field_names and "rope_scaling" not in config
        return {"rope_scaling": None} if needs_a_value else {}
    if "rope_scaling" not in field_names:
        raise _refusal_error(family, f"no rope_scaling, and its rope_type is {rope_type}")
    scaling = {name: value for name, value in parameters.items() if name not in CONFIG_NAMES}
    # Some families read the original length from a separate field, others from rope_scaling.
    original_length = parameters.get(ORIGINAL_LENGTH)
    has_own_field = ORIGINAL_LENGTH in field_names and config.get(ORIGINAL_LENGTH) is not None
    if original_length is not None and not has_own_field:
        scaling[ORIGINAL_LENGTH] = original_length
    return {"rope_scaling": {**scaling, "type": rope_type, "rope_type": rope_type}}


def _without_layer_types(
    family: str, rope_parameters: Any, field_names: Collection[str]
) -> dict[str, Any]:
    """Return `rope_parameters` as a single dict, merging the dicts of different layer types.

    If the family has a separate base for sliding-window layers, that base is stored under "local rope_theta".

    Raises: SnapKVError: `rope_parameters` is not an object, or the layer types differ in a way that mlx-lm's
        implementation can't represent.
    """
    if not isinstance(rope_parameters, Mapping):
        raise SnapKVError(
            f"{ROPE_PARAMETERS} in its config.json must be an object, got {rope_parameters!r}"
        )
    by_layer_type = {
        layer_type: dict(parameters)
        for layer_type, parameters in rope_parameters.items()
        if isinstance(parameters, Mapping)
    }
    if not by_layer_type:
        return dict(rope_parameters)
    has_local_base = any(field_name in field_names for field_name in CONFIG_NAMES[LOCAL_BASE])
    may_differ = has_local_base or family in UNSCALED_SLIDING
    if may_differ and set(by_layer_type) == {FULL_ATTENTION, SLIDING_ATTENTION}:
        full_parameters = by_layer_type[FULL_ATTENTION]
        sliding_parameters = by_layer_type[SLIDING_ATTENTION]
        names_to_match = [PARTIAL_FACTOR] if has_local_base else [PARTIAL_FACTOR, "rope_theta"]
        values_match = all(
            full_parameters.get(name) == sliding_parameters.get(name) for name in names_to_match
        )
        sliding_is_scaled = sliding_parameters.get("rope_type", "default") != "default"
        if values_match and not sliding_is_scaled:
            if has_local_base:
                full_parameters[LOCAL_BASE] = sliding_parameters.get("rope_theta")
            return full_parameters
    else:
        first, *others = by_layer_type.values()
        if all(other == first for other in others):
            return first
    layer_types = " and ".join(by_layer_type)
    raise _refusal_error(family, f"one RoPE for {layer_types} layers, and these differ")


def _refusal_error(family: str, lack: str) -> SnapKVError:
    """Build the error for a family. `lack` completes the phrase "has ...", e.g. "no rope_theta"."""
    return SnapKVError(
        f"its config.json has {ROPE_PARAMETERS}, as transformers 5 writes it, but mlx-lm's {family!r} does not "
        f"read that and has {lack}: its answers would be wrong"
    )
