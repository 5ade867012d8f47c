"""The attention families whose queries can be captured and whose rows can be dropped: an allow-list.

One small file a family; it says where the attention class lives and what is special about it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import KVCache

from ..errors import UnsupportedModelError
from . import llama, qwen3_next
from .family import AttentionFamily

FAMILIES: tuple[AttentionFamily, ...] = (llama.FAMILY, qwen3_next.FAMILY)


@dataclass(frozen=True)
class AttentionLayer:
    """A layer whose rows can be compressed: its place in the prompt cache, and its attention module."""

    index: int
    attention: Any


def attention_layers(model, prompt_cache: list) -> list[AttentionLayer]:
    """The full-attention layers of `model`: those whose entry of `prompt_cache` is a plain `KVCache`.

    Linear, state-space and sliding-window layers keep their caches and are not listed.

    Raises:
        UnsupportedModelError: there is none, or one belongs to no supported family.
    """
    layers = []
    for index, (layer, cache) in enumerate(zip(model.layers, prompt_cache)):
        if not isinstance(cache, KVCache):
            continue
        family = next((f for f in FAMILIES if f.attention_of(layer) is not None), None)
        if family is None:
            raise UnsupportedModelError(
                f"attention of model type {model_type(model)!r} can't be captured; supported: "
                + ", ".join(f.name for f in FAMILIES)
            )
        layers.append(AttentionLayer(index, family.attention_of(layer)))
    if not layers:
        raise UnsupportedModelError(
            f"model type {model_type(model)!r} has no full-attention layer with a plain KV cache to compress"
        )
    return layers


def attention_classes(layers: list[AttentionLayer]) -> list[type]:
    """The classes of the layers' attention modules, each once."""
    return list(dict.fromkeys(type(layer.attention) for layer in layers))


def model_type(model) -> str:
    return getattr(model, "model_type", None) or type(model).__module__.rpartition(".")[2]
