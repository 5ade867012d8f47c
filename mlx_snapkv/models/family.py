"""An attention class of mlx-lm, and what is special about it."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


def _never(attention: Any) -> bool:
    return False


@dataclass(frozen=True)
class AttentionFamily:
    """One attention class, and how its queries come to what it stores; names are those of a module's attributes."""

    module: str  # where mlx-lm keeps the class, below `mlx_lm.models`
    class_name: str = "Attention"
    scale: str | None = "scale"  # of the softmax; None is `head_dim ** -0.5`
    sinks: str | None = None  # logits `(n_heads,)` of attention sinks, a part of the softmax
    tiled: bool = False  # head j reads KV head j % n_kv_heads, not j // (n_heads // n_kv_heads)
    # The RoPE object, called as `rope(x, offset)`, or a function of the module that returns it; None if there is none.
    rope: str | Callable[[Any], Any] | None = "rope"
    rotates: str | None = None  # whether this layer applies RoPE, if not all layers do
    rotary_tail: str | None = None  # how many of a head's last dimensions RoPE rotates; None is all
    note: str = ""  # for the list of models
    # Why such modules can't be compressed, and why their entries can't be quantised; None where they can.
    refusal: Callable[[list[Any]], str | None] | None = None
    plain_only: Callable[[list[Any]], str | None] | None = None
    idle: Callable[[Any], bool] | None = None  # whether a layer's plain KV cache is left alone
    latent: bool = False  # it stores latents and positional parts of keys (MLA); see `capture`
    factor: int | None = None  # the call's argument that multiplies queries after RoPE
    cap: str | None = None  # the soft cap of logits
    # What computes the scores: mlx-lm's function, "mx.fast" for MLX's, or "" for the module itself, whose queries are
    # then its RoPE's first result.
    attends: str = "scaled_dot_product_attention"
    captures: str = ""  # what else of a call is recorded: the first result of its "rope" or "split"
    method: str = "__call__"  # the one that is called with a cache
    borrows: Callable[[Any], bool] = _never  # whether a module reads an earlier layer's entries
    kind: Callable[[Any], Any] = type  # equal for a borrower and the last such layer before it
    again: int = 0  # later passes of a loop in which its own queries read the entries again

    @property
    def asks_to_hide(self) -> bool:
        """Whether every reader of a cache asks its `hide` what to mask, while the class is patched."""
        return not self.latent and not self.again and self.attends == "scaled_dot_product_attention"

    def attention_class(self) -> type:
        return getattr(importlib.import_module(f"mlx_lm.models.{self.module}"), self.class_name)

    def attentions_of(self, layer) -> list[Any]:
        """The attention modules of this family in a decoder layer, in order; None for one that is left alone."""
        if self.idle and self.idle(layer):
            return [None]
        cls = self.attention_class()
        return [m for _, m in sorted(layer.named_modules()) if type(m) is cls]

    def scale_of(self, attention, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else getattr(attention, self.scale)

    def sinks_of(self, attention) -> mx.array | None:
        return getattr(attention, self.sinks) if self.sinks else None

    def rope_of(self, attention) -> Any | None:
        """An attention module's RoPE, called as `rope(x, offset)`, or None."""
        if self.rope is None or (self.rotates and not getattr(attention, self.rotates)):
            return None
        return getattr(attention, self.rope) if isinstance(self.rope, str) else self.rope(attention)

    def turned(self, attention, x: mx.array, function: Callable[[mx.array], mx.array]) -> mx.array:
        """Return `x` `(B, n_heads, n, head_dim)` with `function` of its rotary dimensions, which are the last."""
        n_before = 0
        if self.rotary_tail is not None:
            n_before = x.shape[3] - getattr(attention, self.rotary_tail)
        if not n_before:
            return function(x)
        tail = function(x[..., n_before:])
        return mx.concatenate([x[..., :n_before].astype(tail.dtype), tail], axis=-1)

    def grouped(self, queries: mx.array, n_kv_heads: int) -> mx.array:
        """Queries `(B, n_heads, n, head_dim)` in an order of heads that puts each KV head's readers together."""
        if not self.tiled:
            return queries
        return mx.unflatten(queries, 1, (-1, n_kv_heads)).swapaxes(1, 2).flatten(1, 2)
