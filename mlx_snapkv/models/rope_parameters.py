"""Give mlx-lm what transformers 5 writes into config.json as `rope_parameters`, by the names that mlx-lm reads.

Most families of mlx-lm 0.32.2 read `rope_theta` and `rope_scaling` alone. Without these LLaMA and Qwen2 silently take a
default base (10,000 and 1,000,000), so their answers are nonsense, and Qwen3-Next fails. Delete this file and its tests
once mlx-lm reads `rope_parameters` for every family, as it does for Qwen3.
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

ROPE_PARAMETERS, PARTIAL = "rope_parameters", "partial_rotary_factor"
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"
# Value -> the names that mlx-lm's families have for it.
CONFIG_NAMES = {
    "rope_theta": ("rope_theta", "rotary_emb_base"),
    PARTIAL: (PARTIAL, "rotary_pct", "rotary_dim"),
    "original_max_position_embeddings": ("original_max_position_embeddings",),
    "local rope_theta": ("rope_local_base_freq", "swa_rope_theta", "rope_local_theta"),
}
# Families that read rope_theta from another part of the configuration (attn_config).
ELSEWHERE = ("dbrx",)
# Family -> the partial_rotary_factor that its code in mlx-lm fixes.
FIXED = {"recurrent_gemma": 0.5}
# Families whose sliding-window layers use the same base, without the scaling of the others.
PLAIN_SLIDING = ("olmo3",)


@dataclass(frozen=True)
class TakenOver:
    """The values of `rope_parameters` that mlx-lm does not read.

    Attributes:
        changes: entries to add to the configuration, as mlx-lm's `model_config` takes them.
        values: the values by mlx-lm's names.
    """

    changes: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        values = (
            f"{name} ({value['rope_type']})" if isinstance(value, Mapping) else f"{name}={value}"
            for name, value in self.values.items()
        )
        return f"{', '.join(values)} from {ROPE_PARAMETERS}, which mlx-lm does not read for this model type"


def taken_over(config: Any) -> TakenOver:
    """Return the values of a configuration's `rope_parameters` that mlx-lm needs under other names; mostly none.

    Raises: SnapKVError: mlx-lm's family has no name for a value, so the model's answers would be nonsense.
    """
    # The code of a model_file may read rope_parameters itself.
    if not isinstance(config, Mapping) or "model_file" in config:
        return TakenOver()
    try:
        model_class, args_class = _get_classes(dict(config))
    except (KeyError, ValueError):  # mlx-lm's own loader reports these
        return TakenOver()
    name = args_class.__module__.removeprefix("mlx_lm.models.")
    nested = "text_config" in config and "text_config" in _fields(args_class)
    text = config["text_config"] if nested else config
    if "text_config" in _fields(args_class):
        args_class = _text_class(name, model_class, text)
    if args_class is None or not isinstance(text, Mapping) or not text.get(ROPE_PARAMETERS):
        return TakenOver()
    families = SUPPORTED.get(name, ())
    has_rope = not families or any(family.rope is not None for family in families)
    if ROPE_PARAMETERS in _fields(args_class) or not has_rope or name in ELSEWHERE:
        return TakenOver()
    changes = _plain(name, text, _fields(args_class))
    values = {key: value for key, value in changes.items() if value is not None}
    return TakenOver({"text_config": {**text, **changes}} if nested else changes, values)


def _fields(args_class: Any) -> Mapping[str, inspect.Parameter]:
    """Return the configuration's keys that mlx-lm's `from_dict` reads."""
    return inspect.signature(args_class).parameters


def _text_class(name: str, model_class: type, text: Any) -> Any:
    """Return the class of arguments that a family makes from its `text_config`; None if it is unknown."""
    for cls in model_class.__mro__:
        for key, value in vars(sys.modules[cls.__module__]).items():
            is_args = isinstance(value, type) and issubclass(value, BaseModelArgs)
            if is_args and key.startswith("Text"):
                return value
    modules = [family.module for family in SUPPORTED.get(name, ())]
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    module = kind if kind in modules else next(iter(modules), None)
    return module and import_module(f"mlx_lm.models.{module}").ModelArgs


def _plain(name: str, config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that `config` lacks, by the names of mlx-lm's `fields`."""
    values = _by_layer_type(name, config[ROPE_PARAMETERS], fields)
    changes: dict[str, Any] = {}
    for key, names in CONFIG_NAMES.items():
        value = values.pop(key, None)
        field_name = next((x for x in names if x in fields), None)
        if value is None or (field_name is not None and config.get(field_name) is not None):
            continue
        if field_name == "rotary_dim":
            size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            changes[field_name] = int(size * value)
        elif field_name is not None:
            changes[field_name] = value
        elif key == "rope_theta" or (
            key == PARTIAL and ROTARY_TAIL not in fields and value != FIXED.get(name, 1)
        ):
            raise _refused(name, f"no {key}")
        if key.startswith("original"):
            values[key] = value
    if config.get("rope_scaling") is not None:
        return changes
    kind = values.get("rope_type") or values.get("type") or "default"
    if kind == "default":
        required = "rope_scaling" in fields and "rope_scaling" not in config
        return changes | ({"rope_scaling": None} if required else {})
    if "rope_scaling" not in fields:
        raise _refused(name, f"no rope_scaling, and its rope_type is {kind}")
    return changes | {"rope_scaling": {**values, "type": kind, "rope_type": kind}}


def _by_layer_type(name: str, values: Any, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rope_parameters` as one dict.

    Raises: SnapKVError: it has a dict for each layer type, and mlx-lm's family can't express their difference.
    """
    if not isinstance(values, Mapping):
        raise SnapKVError(f"{ROPE_PARAMETERS} in its config.json must be an object, got {values!r}")
    kinds = {kind: dict(rope) for kind, rope in values.items() if isinstance(rope, Mapping)}
    if not kinds:
        return dict(values)
    first, local = next(iter(kinds.values())), kinds.get(SLIDING_ATTENTION, {})
    own = any(x in fields for x in CONFIG_NAMES["local rope_theta"])
    if set(kinds) == {FULL_ATTENTION, SLIDING_ATTENTION} and (own or name in PLAIN_SLIDING):
        full, same = kinds[FULL_ATTENTION], [PARTIAL] + ["rope_theta"] * (not own)
        plain = local.get("rope_type", "default") == "default"
        if plain and all(full.get(key) == local.get(key) for key in same):
            return full | ({"local rope_theta": local.get("rope_theta")} if own else {})
    elif all(rope == first for rope in kinds.values()):
        return first
    raise _refused(name, f"one RoPE for {' and '.join(kinds)} layers, and these differ")


def _refused(name: str, what: str) -> SnapKVError:
    """Return the error of a family that has `what`, such as "no rope_theta"."""
    return SnapKVError(
        f"its config.json has {ROPE_PARAMETERS}, as transformers 5 writes it, but mlx-lm's {name!r} does not "
        f"read that and has {what}: its answers would be wrong"
    )
