"""The ways to hold a prompt's rows that are measured side by side."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from ..caches.answer import answer_cache
from ..caches.layers import attention_layers, members
from ..engine.compress import kv_bytes
from ..entries.entries import Entries
from ..models import AttentionFamily
from ..policies import Policy, SnapKV

SHARE = 16  # by default one row in so many is kept
KEEP = 4  # rows that mlx-lm's rotating cache pins at the front
ROOM = 256  # rows for the steps to be measured


@dataclass(frozen=True)
class Contender:
    """One way to hold a prompt's rows.

    Attributes:
        name: as printed.
        kind: "full", "rotating", "quantized", "plain", "snapkv" or "bounded".
        rows: rows that stay in memory per KV head; for the plain cache, those that a step attends to.
        options: what `generate_step` is given for it.
    """

    name: str
    kind: str
    rows: int
    options: dict[str, Any] = field(default_factory=dict)

    def cache(self, family: AttentionFamily, keys: mx.array, values: mx.array, context: int) -> Any:
        """A layer's cache in the state of decoding after a prompt of `context` tokens.

        Args:
            family: the layer's attention family.
            keys, values: `(B, n_kv_heads, rows, head_dim)`; for the rotating cache of all `context` rows.
        """
        if self.kind == "snapkv":
            policy = self.options["policy"]
            quota = policy.quotas(context, 1)[0]
            return answer_cache(family, Entries(keys, values), context, policy, quota, uniform=True)
        cache = KVCache() if self.kind != "rotating" else RotatingKVCache(self.rows, keep=KEEP)
        if self.kind == "plain":
            cache.step = self.rows + ROOM
        cache.update_and_fetch(keys, values)
        if self.kind == "quantized":
            return cache.to_quantized(self.options["kv_group_size"], self.options["kv_bits"])
        return cache


def snapkv_for(context: int) -> SnapKV:
    """The default policy with 1/16 of the rows, of which at most a quarter each are sink and window."""
    rows = context // SHARE
    n_sink, n_window = min(128, rows // 4), max(32, min(512, rows // 4))
    return SnapKV(top_k=rows - n_sink - n_window, n_sink=n_sink, n_window=n_window, min_ctx=0)


def contenders(context: int, policy: Policy, head_dim: int) -> list[Contender]:
    """What is measured at a context length; SnapKV comes last and is absent below its gate."""
    rows = policy.quotas(context, 1)[0].rows
    found = [Contender("full cache", "full", context)]
    if rows < context:
        found.append(Contender(f"max-kv-size {rows}", "rotating", rows))
    group = next((g for g in (64, 32) if head_dim % g == 0), None)
    if group is not None:
        for bits in (8, 4):
            options = {"kv_bits": bits, "kv_group_size": group, "quantized_kv_start": 0}
            found.append(Contender(f"kv-bits {bits}", "quantized", context, options))
    if policy.min_ctx <= context and rows < context:
        found.append(Contender("plain cache, same rows", "plain", rows))
        found.append(Contender("SnapKV", "snapkv", rows, {"policy": policy}))
    return found


def bounded_field(context: int, policy: Policy, with_full: bool) -> list[Contender]:
    """Who reads a long prompt: a block policy, and the full cache beside it if asked for."""
    full = [Contender("full cache", "full", context)] if with_full else []
    most = policy.quotas(context, 1)[0].rows + policy.block
    return [*full, Contender(str(policy), "bounded", most, {"policy": policy})]


def decoding_cache(model, contender: Contender, context: int, batch: int) -> list[Any]:
    """A prompt cache as it is after a prompt of `context` tokens, its full layers filled with random rows.

    Only shapes matter for speed. The other layers have read a few tokens.
    """
    prompt_cache = make_prompt_cache(model)
    mx.eval(model(mx.zeros((batch, 8), mx.int32), cache=prompt_cache))
    for layer in attention_layers(model, prompt_cache):
        keys, values = layer.cache_in(prompt_cache).keys_and_values()
        n = {"rotating": context, "plain": contender.rows - 1}.get(contender.kind, contender.rows)
        rows = [
            mx.random.normal((*x.shape[:2], n, x.shape[3])).astype(x.dtype) for x in (keys, values)
        ]
        layer.put(prompt_cache, contender.cache(layer.family, rows[0], rows[1], context))
    mx.eval([c.state for c in prompt_cache])
    return prompt_cache


def request_cache(model, contender: Contender) -> list[Any]:
    """An empty prompt cache to serve a request from.

    mlx-lm ignores max_kv_size for models that make their own caches, which most do, so the rotating caches
    are put in by hand.
    """
    prompt_cache = make_prompt_cache(model)
    if contender.kind == "rotating":
        for layer in attention_layers(model, prompt_cache):
            layer.put(prompt_cache, RotatingKVCache(contender.rows, keep=KEEP))
    return prompt_cache


def rows_bytes(prompt_cache: list[Any]) -> int:
    """Bytes of the keys and values of all caches that hold rows, mlx-lm's quantised and rotating ones too."""
    rotating = (c for c in members(prompt_cache) if isinstance(c, RotatingKVCache))
    return kv_bytes(prompt_cache) + sum(cache.nbytes for cache in rotating)
