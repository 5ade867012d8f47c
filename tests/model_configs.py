"""Tiny random models of mlx-lm's model types. Each configuration lists only its differences from the base."""

import copy
import importlib
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import yaml
from mlx.utils import tree_flatten, tree_map_with_path, tree_unflatten
from mlx_lm.models.bitlinear_layers import BitLinear

_DATA = yaml.safe_load((Path(__file__).parent / "fixtures" / "model_configs.yaml").read_text())
TINY: dict[str, dict] = _DATA["tiny"]  # complete configurations, for tiny_models.py
LAYERS, LLAMA4_ROPE = _DATA["named"]["layers"], _DATA["named"]["llama4_rope"]
BASE = {name: value for value, names in _DATA["base"] for name in names.split()}
# Differences from BASE. REFUSED_CONFIGS has types and variants of types that can't be compressed.
CONFIGS: dict[str, dict] = {name: {} for name in _DATA["plain"].split()} | _DATA["configs"]
REFUSED_CONFIGS: dict[str, dict] = _DATA["refused"]


def config(model_type: str) -> dict:
    """Return the complete configuration for a type in CONFIGS."""
    return _complete(model_type, CONFIGS[model_type])


def make_model(model_type: str, config: dict | None = None):
    """Return a random float32 model. Its configuration is `config`, or the type's entry in CONFIGS, added to BASE."""
    module = importlib.import_module(f"mlx_lm.models.{model_type}")
    args = _complete(model_type, CONFIGS[model_type] if config is None else config)
    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(args))
    for name, child in tree_flatten(model.leaf_modules(), is_leaf=nn.Module.is_module):
        if isinstance(child, BitLinear):  # its kernel needs Metal
            linear = nn.Linear(child.in_features, child.out_features, bias=False)
            model.update_modules(tree_unflatten([(name, linear)]))
    model.update(tree_map_with_path(_randomise, model.parameters()))
    mx.eval(model.parameters())
    return model.eval()


def _complete(model_type: str, changes: dict) -> dict:
    text = changes.get("text_config")
    if isinstance(text, str):
        changes = {**changes, "text_config": config(text)}
    elif text is not None:
        text = {**BASE, "model_type": f"{model_type}_text", **text}
        changes = {**changes, "text_config": text}
    # mlx-lm changes some configurations.
    return copy.deepcopy({**BASE, "model_type": model_type, **changes})


def _randomise(path: str, x: mx.array) -> mx.array:
    """Return `x` in float32. Sinks, and arrays that are zero until they are loaded, become random."""
    if "sink" in path:
        return mx.random.normal(x.shape)
    zeros = not mx.any(x).item()
    if x.dtype == mx.uint32:  # packed weights
        return mx.random.randint(0, 2**31 - 1, x.shape).astype(x.dtype) if zeros else x
    return 0.5 * mx.random.normal(x.shape) if zeros else x.astype(mx.float32)
