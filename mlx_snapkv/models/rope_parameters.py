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
# Of a value, the names that mlx-lm's families have for it.
CONFIG_NAMES = {
    "rope_theta": ("rope_theta", "rotary_emb_base"),
    PARTIAL: (PARTIAL, "rotary_pct", "rotary_dim"),
    "original_max_position_embeddings": ("original_max_position_embeddings",),
    "local rope_theta": ("rope_local_base_freq", "swa_rope_theta", "rope_local_theta"),
}
# Families that have it in another place (attn_config), and the parts of dimensions that others always turn.
ELSEWHERE = ("dbrx",)
FIXED = {"recurrent_gemma": 0.5}
# Families whose sliding-window layers use the same base, without the scaling of the others.
PLAIN_SLIDING = ("olmo3",)


@dataclass(frozen=True)
class TakenOver:
    """What mlx-lm would not read.

    Attributes:
        changes: of the configuration, as mlx-lm's `model_config` takes them.
        values: by mlx-lm's names, what was missing.
    """

    changes: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        said = (
            f"{name} ({value['rope_type']})" if isinstance(value, Mapping) else f"{name}={value}"
            for name, value in self.values.items()
        )
        return f"{', '.join(said)} from {ROPE_PARAMETERS}, which mlx-lm does not read for this model type"


def taken_over(config: Any) -> TakenOver:
    """What of a configuration's `rope_parameters` mlx-lm has to be given by other names; mostly nothing.

    Raises: SnapKVError: the family can't be given it, so that the model's answers would be nonsense.
    """
    if not isinstance(config, Mapping) or "model_file" in config:  # whose code may read anything
        return TakenOver()
    try:
        model_class, args_class = _get_classes(dict(config))
    except (KeyError, ValueError):  # mlx-lm will say what is wrong
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
    """What mlx-lm's `from_dict` passes on."""
    return inspect.signature(args_class).parameters


def _text_class(name: str, model_class: type, text: Any) -> Any:
    """The class of the arguments that a family with a `text_config` makes of it; None if that is not known."""
    for cls in model_class.__mro__:
        for key, found in vars(sys.modules[cls.__module__]).items():
            is_args = isinstance(found, type) and issubclass(found, BaseModelArgs)
            if is_args and key.startswith("Text"):
                return found
    modules = [family.module for family in SUPPORTED.get(name, ())]
    kind = text.get("model_type") if isinstance(text, Mapping) else None
    module = kind if kind in modules else next(iter(modules), None)
    return module and import_module(f"mlx_lm.models.{module}").ModelArgs


def _plain(name: str, config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    """The values that `config` lacks, by the names of mlx-lm's `fields`."""
    values = _by_layer_type(name, config[ROPE_PARAMETERS], fields)
    changes: dict[str, Any] = {}
    for key, names in CONFIG_NAMES.items():
        value = values.pop(key, None)
        known = next((x for x in names if x in fields), None)
        if value is None or (known is not None and config.get(known) is not None):
            continue
        if known == "rotary_dim":
            size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            changes[known] = int(size * value)
        elif known is not None:
            changes[known] = value
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
    """One dict of `rope_parameters`; of those that have one a layer type, if mlx-lm's family can express them."""
    if not isinstance(values, Mapping):
        raise SnapKVError(f"{ROPE_PARAMETERS} in its config.json must be an object, got {values!r}")
    kinds = {kind: dict(found) for kind, found in values.items() if isinstance(found, Mapping)}
    if not kinds:
        return dict(values)
    first, local = next(iter(kinds.values())), kinds.get(SLIDING_ATTENTION, {})
    own = any(x in fields for x in CONFIG_NAMES["local rope_theta"])
    if set(kinds) == {FULL_ATTENTION, SLIDING_ATTENTION} and (own or name in PLAIN_SLIDING):
        full, same = kinds[FULL_ATTENTION], [PARTIAL] + ["rope_theta"] * (not own)
        plain = local.get("rope_type", "default") == "default"
        if plain and all(full.get(key) == local.get(key) for key in same):
            return full | ({"local rope_theta": local.get("rope_theta")} if own else {})
    elif all(found == first for found in kinds.values()):
        return first
    raise _refused(name, f"one RoPE for {' and '.join(kinds)} layers, and these differ")


def _refused(name: str, what: str) -> SnapKVError:
    return SnapKVError(
        f"its config.json has {ROPE_PARAMETERS}, as transformers 5 writes it, but mlx-lm's {name!r} does not "
        f"read that and has {what}: its answers would be wrong"
    )
