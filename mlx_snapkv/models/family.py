"""Describes mlx-lm's attention classes and how to record their queries."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx


@dataclass(frozen=True)
class AttentionFamily:
    """An mlx-lm attention class, and how to record its queries.

    Attributes:
        module: name of the file in `mlx_lm.models` that defines the class.
        class_name: name of the class.
        scale: name of the attribute with the logit scale. None means `head_dim ** -0.5`.
        sinks: name of the attribute with the logits of the attention sinks, which take part in the softmax. The
            attribute's shape is `(n_heads,)`. None means no sinks.
        tiled: whether query head j reads KV head j % n_kv_heads instead of j // (n_heads // n_kv_heads).
        rope: name of the attribute with the RoPE object, or a function that returns the RoPE object of an attention
            module. The object is called as `rope(x, offset)`. None means no RoPE.
        rope_switch: name of the attribute that is true if the layer applies RoPE. None means that all layers apply
            RoPE.
        rotary_tail: name of the attribute with the number of trailing head dimensions that RoPE rotates. None means
            that RoPE rotates all of them.
        note: remark for the list of models.
        why_refused: returns why the given attention modules can't be compressed, or None if they can.
        why_unquantizable: returns why the given attention modules can't read quantised entries, or None if they can.
        is_idle: returns True for a decoder layer whose cache is never compressed.
        latent: whether the module caches latents and positional keys (MLA); see `capture`.
        query_factor: index of the call argument that multiplies the queries after RoPE. None means that there is no
            such argument.
        logit_cap: name of the attribute with the soft cap for the logits. None means no cap.
        attention_function: name of mlx-lm's attention function if the module calls that function, or "mx.fast" if the
            module calls MLX's. "" means that the module computes attention itself, and that its first RoPE result is
            the queries.
        extra_capture: "rope" or "split" if the first result of the module's RoPE or of `split` must also be recorded.
        method: name of the method that is called with a cache.
        is_borrower: returns True for an attention module that reads an earlier layer's entries.
        lender_key: returns a key for an attention module. A borrower reads the entries of the last earlier layer with
            the same key.
        extra_passes: number of additional passes of a looped model in which the module reads the same entries again.
    """

    module: str
    class_name: str = "Attention"
    scale: str | None = "scale"
    sinks: str | None = None
    tiled: bool = False
    rope: str | Callable[[Any], Any] | None = "rope"
    rope_switch: str | None = None
    rotary_tail: str | None = None
    note: str = ""
    why_refused: Callable[[list[Any]], str | None] = lambda attentions: None
    why_unquantizable: Callable[[list[Any]], str | None] = lambda attentions: None
    is_idle: Callable[[Any], bool] = lambda layer: False
    latent: bool = False
    query_factor: int | None = None
    logit_cap: str | None = None
    attention_function: str = "scaled_dot_product_attention"
    extra_capture: str = ""
    method: str = "__call__"
    is_borrower: Callable[[Any], bool] = lambda attention: False
    lender_key: Callable[[Any], Any] = type
    extra_passes: int = 0

    @property
    def no_sparse(self) -> str | None:
        """Return why sparse attention does not support this class, or None if it does.

        With sparse attention, the cache computes the module's attention; see `models/patch.py`.
        """
        if self.latent:
            return "its layers multiply latents before they call mlx-lm's attention function (MLA)"
        if self.logit_cap:
            return "its layers cap their logits, which mlx-lm's attention function can't"
        if self.extra_passes:
            return "its layers read their entries twice"
        if self.tiled:
            return "its layers tile the entries before they call mlx-lm's attention function"
        if self.attention_function != "scaled_dot_product_attention":
            return "its layers do not call mlx-lm's attention function"
        return None

    def attention_class(self) -> type:
        """Import and return the attention class."""
        module = importlib.import_module(f"mlx_lm.models.{self.module}")
        return getattr(module, self.class_name)

    def attentions_of(self, layer) -> list[Any]:
        """Return the family's attention modules in a layer, sorted by name, or `[None]` if the layer is idle."""
        if self.is_idle(layer):
            return [None]
        attention_class = self.attention_class()
        named_modules = sorted(layer.named_modules())
        return [module for _, module in named_modules if type(module) is attention_class]

    def scale_of(self, attention, head_dim: int) -> float:
        """Return the scale that an attention module applies to its logits."""
        return head_dim**-0.5 if self.scale is None else getattr(attention, self.scale)

    def sinks_of(self, attention) -> mx.array | None:
        """Return an attention module's sink logits `(n_heads,)`, or None if it has no sinks."""
        return getattr(attention, self.sinks) if self.sinks else None

    def rope_of(self, attention) -> Any | None:
        """Return an attention module's RoPE, a callable `rope(x, offset)`.

        Return None if the module does not apply RoPE.
        """
        is_off = self.rope_switch is not None and not getattr(attention, self.rope_switch)
        if self.rope is None or is_off:
            return None
        if isinstance(self.rope, str):
            return getattr(attention, self.rope)
        return self.rope(attention)

    def map_rotary(
        self, attention, vectors: mx.array, function: Callable[[mx.array], mx.array]
    ) -> mx.array:
        """Apply `function` to the rotary (trailing) dimensions of `(B, n_heads, n, head_dim)` vectors."""
        if self.rotary_tail is None:
            return function(vectors)
        n_rotary = getattr(attention, self.rotary_tail)
        n_unrotated = vectors.shape[3] - n_rotary
        if n_unrotated == 0:
            return function(vectors)
        rotary_part = function(vectors[..., n_unrotated:])
        unrotated_part = vectors[..., :n_unrotated].astype(rotary_part.dtype)
        return mx.concatenate([unrotated_part, rotary_part], axis=-1)

    def group_heads(self, queries: mx.array, n_kv_heads: int) -> mx.array:
        """Reorder queries `(B, n_heads, n, head_dim)` so that query heads sharing a KV head are adjacent."""
        if not self.tiled:
            return queries
        tiles = mx.unflatten(queries, 1, (-1, n_kv_heads))
        return tiles.swapaxes(1, 2).flatten(1, 2)
