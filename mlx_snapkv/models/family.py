"""The description of an attention class of mlx-lm, by which its queries can be recorded."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


def _never(attention: Any) -> bool:
    """Return False: the default of `AttentionFamily.borrows`."""
    return False


@dataclass(frozen=True)
class AttentionFamily:
    """One attention class of mlx-lm: where its modules have what the attention is computed from.

    Attributes:
        module: file of the class, below `mlx_lm.models`.
        class_name: name of the class.
        scale: attribute with the factor of the logits; None means `head_dim ** -0.5`.
        sinks: attribute with the logits `(n_heads,)` of attention sinks, which take part in the softmax.
        tiled: whether query head j reads KV head j % n_kv_heads, not j // (n_heads // n_kv_heads).
        rope: attribute with the RoPE object, which is called as `rope(x, offset)`, or a function of the attention
            module that returns it; None without RoPE.
        rotates: attribute that says whether this layer applies RoPE; None if all layers do.
        rotary_tail: attribute with the number of a head's last dimensions that RoPE rotates; None means all.
        note: a remark for the list of models.
        refusal: returns why these attention modules can't be compressed; None if they can.
        plain_only: returns why the entries of these attention modules can't be quantised; None if they can.
        idle: returns whether the plain KV cache of a decoder layer is left alone.
        latent: whether latents and positional parts of keys are stored (MLA); see `capture`.
        factor: index of the call's argument that multiplies queries after RoPE.
        cap: attribute with the soft cap of the logits.
        attends: function that computes the scores: mlx-lm's, "mx.fast" for MLX's, or "" for the module itself; the
            queries are then the first result of its RoPE.
        captures: further result of a call that is recorded: the first of its "rope" or its "split".
        method: method that is called with a cache.
        borrows: returns whether an attention module reads the entries of an earlier layer.
        kind: returns a value that is equal for a module that borrows and the layer that it borrows from, the last
            of its kind before it.
        again: number of later passes of a loop in which the module's own queries read the entries again.
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
        """Return why a cache can't compute the attention of these modules (`models/patch.py`); None if it can."""
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
        """Return the class, imported."""
        return getattr(importlib.import_module(f"mlx_lm.models.{self.module}"), self.class_name)

    def attentions_of(self, layer) -> list[Any]:
        """Return the attention modules of this family in a decoder layer, in order; `[None]` if it is left alone."""
        if self.idle and self.idle(layer):
            return [None]
        cls = self.attention_class()
        return [m for _, m in sorted(layer.named_modules()) if type(m) is cls]

    def scale_of(self, attention, head_dim: int) -> float:
        """Return the factor by which an attention module multiplies its logits."""
        return head_dim**-0.5 if self.scale is None else getattr(attention, self.scale)

    def sinks_of(self, attention) -> mx.array | None:
        """Return the `(n_heads,)` logits of an attention module's sinks; None without sinks."""
        return getattr(attention, self.sinks) if self.sinks else None

    def rope_of(self, attention) -> Any | None:
        """Return an attention module's RoPE, called as `rope(x, offset)`; None without RoPE."""
        if self.rope is None or (self.rotates and not getattr(attention, self.rotates)):
            return None
        return getattr(attention, self.rope) if isinstance(self.rope, str) else self.rope(attention)

    def map_rotary(
        self, attention, x: mx.array, function: Callable[[mx.array], mx.array]
    ) -> mx.array:
        """Return `x` `(B, n_heads, n, head_dim)` with `function` of its rotary dimensions, which are the last."""
        if self.rotary_tail is None:
            return function(x)
        n_unrotated = x.shape[3] - getattr(attention, self.rotary_tail)
        if n_unrotated == 0:
            return function(x)
        tail = function(x[..., n_unrotated:])
        return mx.concatenate([x[..., :n_unrotated].astype(tail.dtype), tail], axis=-1)

    def grouped(self, queries: mx.array, n_kv_heads: int) -> mx.array:
        """Return queries `(B, n_heads, n, head_dim)` with the query heads of each KV head as neighbours."""
        if not self.tiled:
            return queries
        by_kv_head = mx.unflatten(queries, 1, (-1, n_kv_heads)).swapaxes(1, 2)
        return by_kv_head.flatten(1, 2)
