"""Describe an attention class of mlx-lm, so that its queries can be recorded."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


def _never(attention: Any) -> bool:
    """Return False. This is the default of `AttentionFamily.borrows`."""
    return False


@dataclass(frozen=True)
class AttentionFamily:
    """An attention class of mlx-lm, and where its modules have what is needed to record queries.

    Attributes:
        module: file of the class in `mlx_lm.models`.
        class_name: name of the class.
        scale: attribute with the factor of the logits; None means `head_dim ** -0.5`.
        sinks: attribute with the logits `(n_heads,)` of attention sinks, which take part in the softmax.
        tiled: whether query head j reads KV head j % n_kv_heads, not j // (n_heads // n_kv_heads).
        rope: attribute with the RoPE object, which is called as `rope(x, offset)`, or a function that returns it for an
            attention module; None without RoPE.
        rotates: attribute that is true if this layer applies RoPE; None if all layers do.
        rotary_tail: attribute with the number of last dimensions of a head that RoPE rotates; None means all.
        note: remark for the list of models.
        refusal: returns why attention modules can't be compressed; None if they can.
        plain_only: returns why the entries of attention modules can't be quantised; None if they can.
        idle: returns whether a decoder layer does not use its plain KV cache.
        latent: whether the module stores latents and positional parts of keys (MLA); see `capture`.
        factor: index of the call's argument that multiplies the queries after RoPE.
        cap: attribute with the soft cap of the logits.
        attends: function that computes the attention: mlx-lm's, "mx.fast" for MLX's, or "" for the module itself. For
            "", the queries are the first result of the module's RoPE.
        captures: another result to record: the first of "rope" or of "split" in a call.
        method: method that is called with a cache.
        borrows: returns whether an attention module reads the entries of an earlier layer.
        kind: returns a value that is equal for a module that borrows entries and the layer that lends them. This is the
            last layer of its kind before the borrower.
        again: number of additional passes of a looped model in which the module's own queries read the entries.
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
    plain_only: Callable[[list[Any]], str | None] | None = None
    idle: Callable[[Any], bool] | None = None
    latent: bool = False
    factor: int | None = None
    cap: str | None = None
    attends: str = "scaled_dot_product_attention"
    captures: str = ""
    method: str = "__call__"
    borrows: Callable[[Any], bool] = _never
    kind: Callable[[Any], Any] = type
    again: int = 0

    @property
    def no_sparse(self) -> str | None:
        """Return why a cache can't compute the attention of these modules (see `models/patch.py`); None if it can."""
        if self.latent:
            return "its layers multiply latents before they call mlx-lm's attention function (MLA)"
        if self.cap:
            return "its layers cap their logits, which mlx-lm's attention function can't"
        if self.again:
            return "its layers read their entries twice"
        if self.tiled:
            return "its layers tile the entries before they call mlx-lm's attention function"
        if self.attends != "scaled_dot_product_attention":
            return "its layers do not call mlx-lm's attention function"
        return None

    def attention_class(self) -> type:
        """Import and return the class."""
        return getattr(importlib.import_module(f"mlx_lm.models.{self.module}"), self.class_name)

    def attentions_of(self, layer) -> list[Any]:
        """Return the attention modules of this family in a decoder layer, in order; `[None]` if the layer is idle."""
        if self.idle and self.idle(layer):
            return [None]
        cls = self.attention_class()
        return [m for _, m in sorted(layer.named_modules()) if type(m) is cls]

    def scale_of(self, attention, head_dim: int) -> float:
        """Return the factor by which an attention module multiplies its logits."""
        return head_dim**-0.5 if self.scale is None else getattr(attention, self.scale)

    def sinks_of(self, attention) -> mx.array | None:
        """Return the logits `(n_heads,)` of an attention module's sinks; None without sinks."""
        return getattr(attention, self.sinks) if self.sinks else None

    def rope_of(self, attention) -> Any | None:
        """Return the RoPE of an attention module, called as `rope(x, offset)`; None without RoPE."""
        if self.rope is None or (self.rotates and not getattr(attention, self.rotates)):
            return None
        return getattr(attention, self.rope) if isinstance(self.rope, str) else self.rope(attention)

    def map_rotary(
        self, attention, x: mx.array, function: Callable[[mx.array], mx.array]
    ) -> mx.array:
        """Apply `function` to the rotary dimensions of `x` `(B, n_heads, n, head_dim)`, which are the last ones."""
        if self.rotary_tail is None:
            return function(x)
        n_unrotated = x.shape[3] - getattr(attention, self.rotary_tail)
        if n_unrotated == 0:
            return function(x)
        tail = function(x[..., n_unrotated:])
        return mx.concatenate([x[..., :n_unrotated].astype(tail.dtype), tail], axis=-1)

    def group_heads(self, queries: mx.array, n_kv_heads: int) -> mx.array:
        """Reorder queries `(B, n_heads, n, head_dim)`, so that the query heads of a KV head are adjacent."""
        if not self.tiled:
            return queries
        by_kv_head = mx.unflatten(queries, 1, (-1, n_kv_heads)).swapaxes(1, 2)
        return by_kv_head.flatten(1, 2)
