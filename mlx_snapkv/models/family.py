"""An attention class of mlx-lm, and what is special about it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class AttentionFamily:
    """One attention class that calls mlx-lm's attention function with per-head keys and values.

    Attributes:
        module, class_name: where mlx-lm keeps the class, below `mlx_lm.models`.
        scale: the attention module's name for its softmax scale; None if it keeps none and uses
            `head_dim ** -0.5`.
        sinks: its name for the logits `(n_heads,)` of attention sinks, which take part in the softmax.
        tiled: query head `j` reads KV head `j % n_kv_heads`, not `j // (n_heads // n_kv_heads)`.
        note: what a reader of the list of models should know.
        refusal: why a model with these attention modules can't be compressed, or None if it can.
        idle: tells layers whose plain KV cache is to be left alone.
    """

    module: str
    class_name: str = "Attention"
    scale: str | None = "scale"
    sinks: str | None = None
    tiled: bool = False
    note: str = ""
    refusal: Callable[[list[Any]], str | None] | None = None
    idle: Callable[[Any], bool] | None = None

    def attention_class(self) -> type:
        return getattr(importlib.import_module(f"mlx_lm.models.{self.module}"), self.class_name)

    def attention_of(self, layer) -> Any | None:
        """The attention module of this family in a decoder layer, or None."""
        cls = self.attention_class()
        return next((m for m in layer.modules() if type(m) is cls), None)

    def scale_of(self, attention, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else getattr(attention, self.scale)

    def sinks_of(self, attention) -> mx.array | None:
        return None if self.sinks is None else getattr(attention, self.sinks)

    def grouped(self, queries: mx.array, n_kv_heads: int) -> mx.array:
        """Queries `(B, n_heads, n, head_dim)` in an order of heads that puts each KV head's readers together."""
        if not self.tiled:
            return queries
        by_turn = mx.unflatten(queries, 1, (-1, n_kv_heads))
        return by_turn.swapaxes(1, 2).flatten(1, 2)
