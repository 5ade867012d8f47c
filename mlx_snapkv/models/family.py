"""An attention class of mlx-lm, and what is special about it."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..errors import UnsupportedModelError
from ..several.shard import of_heads_here
from .rope import composes, mean_rotation

# The attention modules' names for the output projection.
OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "wo", "attn_resid")


def _never(attention: Any) -> bool:
    return False


@dataclass(frozen=True)
class AttentionFamily:
    """One attention class, and how its queries come to what it stores.

    Attributes:
        module, class_name: where mlx-lm keeps the class, below `mlx_lm.models`.
        scale: the attention module's name for its softmax scale; None if it keeps none and uses
            `head_dim ** -0.5`.
        sinks: its name for the logits `(n_heads,)` of attention sinks, which take part in the softmax.
        tiled: query head `j` reads KV head `j % n_kv_heads`, not `j // (n_heads // n_kv_heads)`.
        rope: its name for the RoPE object, called as `rope(x, offset)`, or a function of the module
            that returns it; None if there is none.
        rotates: its name for whether this layer applies RoPE, if not all layers do.
        rotary_tail: its name for how many of a head's last dimensions RoPE rotates; None if it is given all.
        normed: its name for a norm of keys after RoPE, which can't be rotated any more; None is none.
        note: for the list of models.
        refusal: why a model with these attention modules can't be compressed; None if it can.
        idle: whether a layer's plain KV cache is left alone.
        latent: it stores latents and positional parts of keys (MLA); see `capture`.
        factor: which argument of its call multiplies queries after RoPE, past the attention function; None is none.
        cap: its name for the soft cap of logits.
        attends: what computes the scores: mlx-lm's function, "mx.fast" for MLX's, or "" for the module itself, whose
            queries are then its RoPE's first result.
        captures: what else of a call is recorded: the first result of its "rope", or its first "split".
        method: the method that is called with a cache.
        borrows: whether an attention module reads the entries of an earlier layer instead of its own.
        kind: equal for a borrower and the layer it borrows from, the last such one before it.
        again: later passes of a loop in which its own queries read the entries again.
        plain_only: why the entries that such attention modules read can't be quantised, or None if they can.
    """

    module: str
    class_name: str = "Attention"
    scale: str | None = "scale"
    sinks: str | None = None
    tiled: bool = False
    rope: str | Callable[[Any], Any] | None = "rope"
    rotates: str | None = None
    rotary_tail: str | None = None
    normed: str | None = None
    note: str = ""
    refusal: Callable[[list[Any]], str | None] | None = None
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
    plain_only: Callable[[list[Any]], str | None] | None = None

    @property
    def asks_to_hide(self) -> bool:
        """Whether every reader of a cache asks its `hide` what to mask, while the class is patched."""
        own = not (self.latent or self.again)
        return own and self.attends == "scaled_dot_product_attention"

    def attention_class(self) -> type:
        return getattr(importlib.import_module(f"mlx_lm.models.{self.module}"), self.class_name)

    def attentions_of(self, layer) -> list[Any]:
        """The attention modules of this family in a decoder layer, in order."""
        cls = self.attention_class()
        return [m for _, m in sorted(layer.named_modules()) if type(m) is cls]

    def scale_of(self, attention, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else getattr(attention, self.scale)

    def sinks_of(self, attention) -> mx.array | None:
        return None if self.sinks is None else getattr(attention, self.sinks)

    def cap_of(self, attention) -> float | None:
        return None if self.cap is None else getattr(attention, self.cap)

    def rope_of(self, attention) -> Any | None:
        """An attention module's RoPE, called as `rope(x, offset)`, or None."""
        if self.rope is None or (self.rotates and not getattr(attention, self.rotates)):
            return None
        return getattr(attention, self.rope) if isinstance(self.rope, str) else self.rope(attention)

    def can_turn(self, attention, rope, head_dim: int, length: int) -> bool:
        """Whether keys can be turned on by `rope`, which is `rope_of` the module, at positions beyond `length`."""
        if self.normed and hasattr(attention, self.normed):
            return False
        return composes(rope, self._n_rotary(attention, head_dim), length)

    def mean_rotation(self, attention, rope, head_dim: int, start: int, n: int) -> mx.array:
        """The mean of the matrices that turn queries at `[start, start + n)`, float32 `(head_dim, head_dim)`."""
        n_rotary = self._n_rotary(attention, head_dim)
        n_before = head_dim - n_rotary
        unturned = mx.eye(head_dim) * (mx.arange(head_dim) < n_before)
        return unturned + mx.pad(mean_rotation(rope, n_rotary, start, n), (n_before, 0))

    def _n_rotary(self, attention, head_dim: int) -> int:
        return head_dim if self.rotary_tail is None else getattr(attention, self.rotary_tail)

    def turned(self, attention, x: mx.array, function: Callable[[mx.array], mx.array]) -> mx.array:
        """`x` `(B, n_heads, n, head_dim)` with `function` of its rotary dimensions, which are the last."""
        n_before = x.shape[3] - self._n_rotary(attention, x.shape[3])
        if not n_before:
            return function(x)
        tail = function(x[..., n_before:])
        return mx.concatenate([x[..., :n_before].astype(tail.dtype), tail], axis=-1)

    def grouped(self, queries: mx.array, n_kv_heads: int) -> mx.array:
        """Queries `(B, n_heads, n, head_dim)` in an order of heads that puts each KV head's readers together."""
        if not self.tiled:
            return queries
        by_turn = mx.unflatten(queries, 1, (-1, n_kv_heads))
        return by_turn.swapaxes(1, 2).flatten(1, 2)

    def readers(self, kv_head: int, n_kv_heads: int, n_heads: int) -> range:
        """The query heads that read a KV head."""
        if self.tiled:
            return range(kv_head, n_heads, n_kv_heads)
        group = n_heads // n_kv_heads
        return range(kv_head * group, (kv_head + 1) * group)

    def output_of(self, attention) -> Any:
        """An attention module's output projection; UnsupportedModelError if it has none of a known name."""
        found = (getattr(attention, name, None) for name in OUTPUTS)
        output = next((module for module in found if module is not None), None)
        if output is None:
            raise UnsupportedModelError(
                f"{type(attention).__name__} of {self.module!r} has no output projection of a known name "
                f"({', '.join(OUTPUTS)}), which this policy needs"
            )
        return output

    def output_weights(
        self, attention, kv_head: int, n_kv_heads: int, n_heads: int, like: mx.array
    ) -> mx.array:
        """The output projection's weights `(group, head_dim, hidden_size)`, for each query head that reads a KV head.

        The module is called on unit vectors like these values, so that quantised and adapted weights count too; its
        bias, and the norm or gate that a few families apply before it, do not.
        """
        readers = self.readers(kv_head, n_kv_heads, n_heads)
        units = mx.eye(like.shape[3], dtype=like.dtype)
        by_head = [units] * n_heads
        if self.latent:  # each head makes values of its own of a latent
            by_head = list(attention.unembed_out(units[None, None])[0])
        D, output = by_head[0].shape[1], of_heads_here(self.output_of(attention))

        def written(values: mx.array, head: int) -> mx.array:
            return output(mx.pad(values, [(0, 0), (head * D, (n_heads - 1 - head) * D)]))

        nothing = written(mx.zeros((1, D), like.dtype), 0)
        return mx.stack([written(by_head[head], head) - nothing for head in readers])
