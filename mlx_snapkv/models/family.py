"""An attention class of mlx-lm, and what is special about it."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .rope import undo_rope


@dataclass(frozen=True)
class AttentionFamily:
    """One attention class that calls mlx-lm's attention function with per-head keys and values.

    Attributes:
        module, class_name: where mlx-lm keeps the class, below `mlx_lm.models`.
        scale: the attention module's name for its softmax scale; None if it keeps none and uses
            `head_dim ** -0.5`.
        sinks: its name for the logits `(n_heads,)` of attention sinks, which take part in the softmax.
        tiled: query head `j` reads KV head `j % n_kv_heads`, not `j // (n_heads // n_kv_heads)`.
        rope: its name for what turns queries and keys, called as `rope(x, offset)`, or a function of the module
            that gives it; None if nothing turns.
        rotates: its name for whether this layer turns them, if not all layers do.
        rotary_tail: its name for how many of a head's last dimensions turn; None if those to turn are given whole.
        note: what a reader of the list of models should know.
        refusal: why a model with these attention modules can't be compressed, or None if it can.
        idle: tells layers whose plain KV cache is to be left alone.
    """

    module: str
    class_name: str = "Attention"
    scale: str | None = "scale"
    sinks: str | None = None
    tiled: bool = False
    rope: str | Callable[[Any], Any] | None = "rope"
    rotates: str | None = None
    rotary_tail: str | None = None
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

    def rope_of(self, attention) -> Any | None:
        """What turns an attention module's queries, called as `rope(x, offset)`, or None."""
        if self.rope is None or (self.rotates and not getattr(attention, self.rotates)):
            return None
        return getattr(attention, self.rope) if isinstance(self.rope, str) else self.rope(attention)

    def undo_rope(self, attention, rope, queries: mx.array, offset: int) -> mx.array:
        """Recorded queries `(B, n_heads, n, head_dim)` as they were before `rope`, float32.

        What a family does to its queries after RoPE, which with a few is a norm or a factor, is not undone.

        Args:
            rope: what `rope_of` gave for this module.
            offset: position of the first query.
        """
        if self.rotary_tail is None:
            return undo_rope(rope, queries, offset)
        split = queries.shape[3] - getattr(attention, self.rotary_tail)
        tail = undo_rope(rope, queries[..., split:], offset)
        return mx.concatenate([queries[..., :split].astype(tail.dtype), tail], axis=-1)

    def grouped(self, queries: mx.array, n_kv_heads: int) -> mx.array:
        """Queries `(B, n_heads, n, head_dim)` in an order of heads that puts each KV head's readers together."""
        if not self.tiled:
            return queries
        by_turn = mx.unflatten(queries, 1, (-1, n_kv_heads))
        return by_turn.swapaxes(1, 2).flatten(1, 2)
