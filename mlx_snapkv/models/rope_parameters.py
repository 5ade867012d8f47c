"""Translate the `rope_parameters` of transformers 5 to the names that mlx-lm reads.

Most model families in mlx-lm 0.32.2 read only `rope_theta` and `rope_scaling`. If both are missing, LLaMA and Qwen2
silently fall back to a default base (10,000 and 1,000,000) and generate nonsense, and Qwen3-Next fails. Delete this
file and its tests once mlx-lm reads `rope_parameters` for every family, as it already does for Qwen3.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from mlx_lm.models.base import BaseModelArgs
from mlx_lm.utils import _get_classes

from ..errors import SnapKVError
from .table import ROTARY_TAIL, SUPPORTED

ROPE_PARAMETERS = "rope_parameters"
PARTIAL = "partial_rotary_factor"
ORIGINAL_LENGTH = "original_max_position_embeddings"
LOCAL_BASE = "local rope_theta"  # our name for the base of sliding-window layers
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
# Parameter -> its possible names in mlx-lm's configurations.
CONFIG_NAMES = {
    "rope_theta": ("rope_theta", "rotary_emb_base"),
    PARTIAL: (PARTIAL, "rotary_pct", "rotary_dim"),
    ORIGINAL_LENGTH: (ORIGINAL_LENGTH,),
    LOCAL_BASE: ("rope_local_base_freq", "swa_rope_theta", "rope_local_theta"),
}
# Families that read rope_theta elsewhere in the configuration (attn_config).
ELSEWHERE = ("dbrx",)
# Family -> the partial_rotary_factor hard-coded in mlx-lm.
FIXED = {"recurrent_gemma": 0.5}
# Families whose sliding-window layers use the same base, but no scaling.
PLAIN_SLIDING = ("olmo3",)


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
        """Return a line for the user that lists the values and says where they come from."""
        values = (
            f"{name} ({value['rope_type']})" if isinstance(value, Mapping) else f"{name}={value}"
            for name, value in self.values.items()
        )
        return f"{', '.join(values)} from {ROPE_PARAMETERS}, which mlx-lm does not read for this model type"


def unread_parameters(config: Any) -> UnreadParameters:
    """Return the RoPE parameters that mlx-lm needs under other names, which few configurations have.

    Raises: SnapKVError: mlx-lm's family has no name for a required value, so the model would generate nonsense.
    """
    # A model_file brings its own code, which may read rope_parameters.
    if not isinstance(config, Mapping) or "model_file" in config:
        return UnreadParameters()
    try:
        model_class, args_class = _get_classes(dict(config))
    except (KeyError, ValueError):  # mlx-lm reports these when it loads the model
        return UnreadParameters()
    name = args_class.__module__.removeprefix("mlx_lm.models.")
    has_text_class = "text_config" in _fields(args_class)
    is_nested = has_text_class and "text_config" in config
    text = config["text_config"] if is_nested else config
    text_class = _text_class(name, model_class, text) if has_text_class else args_class
    if text_class is None or not isinstance(text, Mapping) or not text.get(ROPE_PARAMETERS):
        return UnreadParameters()
    fields = _fields(text_class)
    if not _needs_other_names(name, fields):
        return UnreadParameters()
    changes = _renamed_rope_parameters(name, text, fields)
    values = {key: value for key, value in changes.items() if value is not None}
    return UnreadParameters(
        changes={"text_config": {**text, **changes}} if is_nested else changes, values=values
    )


def _fields(args_class: Any) -> Mapping[str, inspect.Parameter]:
    """Return the configuration keys that mlx-lm's `from_dict` reads."""
    return inspect.signature(args_class).parameters


def _text_class(name: str, model_class: type, text: Any) -> Any:
    """Return the class that a family builds from its `text_config`, or None if it is unknown."""
    for cls in model_class.__mro__:
        for key, value in vars(sys.modules[cls.__module__]).items():
            is_args = isinstance(value, type) and issubclass(value, BaseModelArgs)
            if is_args and key.startswith("Text"):
                return value
    modules = [family.module for family in SUPPORTED.get(name, ())]
    if not modules:
        return None
    model_type = text.get("model_type") if isinstance(text, Mapping) else None
    module = model_type if model_type in modules else modules[0]
    return import_module(f"mlx_lm.models.{module}").ModelArgs


def _needs_other_names(name: str, fields: Mapping[str, Any]) -> bool:
    """Return whether a family has RoPE but reads neither `rope_parameters` nor a `rope_theta` stored elsewhere."""
    families = SUPPORTED.get(name, ())
    has_rope = not families or any(family.rope is not None for family in families)
    return has_rope and ROPE_PARAMETERS not in fields and name not in ELSEWHERE


def _renamed_rope_parameters(
    name: str, config: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the RoPE parameters that `config` lacks, under the names of mlx-lm's `fields`.

    Raises: SnapKVError: the family has no field for a value that its RoPE needs.
    """
    parameters = _without_layer_types(name, config[ROPE_PARAMETERS], fields)
    changes: dict[str, Any] = {}
    for key, names in CONFIG_NAMES.items():
        value = parameters.get(key)
        if value is None:
            continue
        field_name = next((x for x in names if x in fields), None)
        if field_name is None:
            if _is_needed(key, value, name, fields):
                raise _refused(name, f"no {key}")
        elif config.get(field_name) is None:
            changes[field_name] = value
            # `rotary_dim` is a number of dimensions, while transformers stores a fraction.
            if field_name == "rotary_dim":
                changes[field_name] = int(_head_dim(config) * value)
    return changes | _rope_scaling(name, config, parameters, fields)


def _is_needed(key: str, value: Any, name: str, fields: Mapping[str, Any]) -> bool:
    """Return whether a family without a field for `key` would compute a wrong RoPE."""
    if key == PARTIAL:
        # A family with a rotary tail reads its size. Others hard-code the fraction, mostly as 1.
        return ROTARY_TAIL not in fields and value != FIXED.get(name, 1)
    return key == "rope_theta"


def _head_dim(config: Mapping[str, Any]) -> int:
    """Return the head size that a configuration defines."""
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _rope_scaling(
    name: str, config: Mapping[str, Any], parameters: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the `rope_scaling` entry to add to `config`, or an empty dict if none is needed.

    Raises: SnapKVError: the RoPE is scaled, but the family has no field for the scaling.
    """
    if config.get("rope_scaling") is not None:
        return {}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        # The field may have no default, in which case mlx-lm requires a value.
        is_left_out = "rope_scaling" in fields and "rope_scaling" not in config
        return {"rope_scaling": None} if is_left_out else {}
    if "rope_scaling" not in fields:
        raise _refused(name, f"no rope_scaling, and its rope_type is {kind}")
    scaling = {key: value for key, value in parameters.items() if key not in CONFIG_NAMES}
    # Some families read the original length from a field of its own, others from rope_scaling.
    original_length = parameters.get(ORIGINAL_LENGTH)
    is_in_field = ORIGINAL_LENGTH in fields and config.get(ORIGINAL_LENGTH) is not None
    if original_length is not None and not is_in_field:
        scaling[ORIGINAL_LENGTH] = original_length
    return {"rope_scaling": {**scaling, "type": kind, "rope_type": kind}}


def _without_layer_types(name: str, values: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` as a single dict, merging the dicts of different layer types.

    If the family has a separate base for sliding-window layers, it is stored under "local rope_theta".

    Raises: SnapKVError: `values` is not an object, or the layer types differ in a way that mlx-lm's family can't
        express.
    """
    if not isinstance(values, Mapping):
        raise SnapKVError(f"{ROPE_PARAMETERS} in its config.json must be an object, got {values!r}")
    by_layer_type = {kind: dict(rope) for kind, rope in values.items() if isinstance(rope, Mapping)}
    if not by_layer_type:
        return dict(values)
    has_local_base = any(x in fields for x in CONFIG_NAMES[LOCAL_BASE])
    may_differ = has_local_base or name in PLAIN_SLIDING
    if may_differ and set(by_layer_type) == {FULL_ATTENTION, SLIDING_ATTENTION}:
        full = by_layer_type[FULL_ATTENTION]
        sliding = by_layer_type[SLIDING_ATTENTION]
        common = [PARTIAL] if has_local_base else [PARTIAL, "rope_theta"]
        is_scaled = sliding.get("rope_type", "default") != "default"
        if not is_scaled and all(full.get(key) == sliding.get(key) for key in common):
            local = {LOCAL_BASE: sliding.get("rope_theta")} if has_local_base else {}
            return full | local
    else:
        first = next(iter(by_layer_type.values()))
        if all(rope == first for rope in by_layer_type.values()):
            return first
    raise _refused(name, f"one RoPE for {' and '.join(by_layer_type)} layers, and these differ")


def _refused(name: str, what: str) -> SnapKVError:
    """Build the error for a family that has `what`, such as "no rope_theta"."""
    return SnapKVError(
        f"its config.json has {ROPE_PARAMETERS}, as transformers 5 writes it, but mlx-lm's {name!r} does not "
        f"read that and has {what}: its answers would be wrong"
    )
