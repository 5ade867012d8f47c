"""The ways to hold a prompt's entries that are measured side by side."""

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

from ..caches.decode import decode_cache
from ..caches.layers import AttentionLayer, attention_layers, layer_caches, members
from ..caches.quantizable import head_sizes
from ..entries.entries import Entries
from ..policies import Policy, SnapKV

SHARE = 16  # by default one entry in so many is kept
KEEP = 4  # entries that mlx-lm's rotating cache pins at the front
ROOM = 256  # entries for the steps to be measured


@dataclass(frozen=True)
class Contender:
    """One way to hold a prompt's entries.

    Attributes:
        name: as printed.
        kind: "full", "rotating", "quantized", "plain", "snapkv" or "bounded".
        entries: entries that stay in memory per KV head; for the plain cache, those that a step attends to.
        options: what `generate_step` is given for it.
    """

    name: str
    kind: str
    entries: int
    options: dict[str, Any] = field(default_factory=dict)

    def record(self, context: int, **figures: Any) -> dict[str, Any]:
        """What was measured of it at a context length, as a JSON object."""
        about = {"context": context, "contender": self.name, "kind": self.kind}
        return about | {"entries": self.entries} | figures

    def cache(self, layer: AttentionLayer, keys: mx.array, values: mx.array, context: int) -> Any:
        """A layer's cache in the state of decoding after a prompt of `context` tokens.

        Args:
            layer: the model's layer.
            keys, values: `(B, n_kv_heads, entries, head_dim)`; for the rotating cache of all `context` entries.
        """
        if self.kind == "snapkv":
            policy, entries = self.options["policy"], Entries(keys, values)
            (quota,), scores = policy.quotas(context, 1), mx.zeros(keys.shape[:3])
            return decode_cache(layer, entries, scores, context, policy, quota, uniform=True)
        cache = KVCache() if self.kind != "rotating" else RotatingKVCache(self.entries, keep=KEEP)
        if self.kind == "plain":
            cache.step = self.entries + ROOM
        cache.update_and_fetch(keys, values)
        if self.kind == "quantized":
            return cache.to_quantized(self.options["kv_group_size"], self.options["kv_bits"])
        return cache


def snapkv_for(context: int) -> SnapKV:
    """SnapKV at a fixed shape, with 1/16 of the entries, of which at most a quarter each are sink and window."""
    entries = context // SHARE
    n_sink, n_window = min(128, entries // 4), max(32, min(512, entries // 4))
    return SnapKV(
        top_k=entries - n_sink - n_window,
        n_sink=n_sink,
        n_window=n_window,
        obs_window=32,
        lookahead=4,
        on_full="keydiff",
    )


def contenders(model, context: int, policy: Policy) -> list[Contender]:
    """What is measured at a context length; SnapKV comes last and is absent below its gate."""
    entries = policy.quotas(context, 1)[0].entries
    found = [Contender("full cache", "full", context)]
    if entries < context:
        found.append(Contender(f"max-kv-size {entries}", "rotating", entries))
    sizes = head_sizes(model, attention_layers(model, make_prompt_cache(model)))
    group = next((g for g in (64, 32) if all(size % g == 0 for size in sizes)), None)
    # MLX has no products with batches of quantised entries on CUDA.
    if group is not None and not mx.cuda.is_available():
        for bits in (8, 4):
            options = {"kv_bits": bits, "kv_group_size": group, "quantized_kv_start": 0}
            found.append(Contender(f"kv-bits {bits}", "quantized", context, options))
    if policy.min_ctx <= context and entries < context:
        found.append(Contender("plain cache, same entries", "plain", entries))
        found.append(Contender("SnapKV", "snapkv", entries, {"policy": policy}))
    return found


def bounded_field(context: int, policy: Policy, with_full: bool) -> list[Contender]:
    """Who reads a long prompt: a block policy, and the full cache beside it if asked for."""
    full = [Contender("full cache", "full", context)] if with_full else []
    most = policy.quotas(context, 1)[0].entries + policy.block
    return [*full, Contender(str(policy), "bounded", most, {"policy": policy})]


def decoding_cache(model, contender: Contender, context: int) -> list[Any]:
    """A prompt cache as it is after a prompt of `context` tokens, its full layers filled with random entries.

    Only shapes matter for speed. The other layers have read a few tokens.
    """
    prompt_cache = make_prompt_cache(model)
    mx.eval(model(mx.zeros((1, 8), mx.int32), cache=prompt_cache))
    for layer in attention_layers(model, prompt_cache):
        keys, values = layer.cache_in(prompt_cache).keys_and_values()
        rows = {"rotating": context, "plain": contender.entries - 1}
        n = rows.get(contender.kind, contender.entries)
        held = [
            mx.random.normal((*x.shape[:2], n, x.shape[3])).astype(x.dtype) for x in (keys, values)
        ]
        layer.put(prompt_cache, contender.cache(layer, held[0], held[1], context))
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
            layer.put(prompt_cache, RotatingKVCache(contender.entries, keep=KEEP))
    return prompt_cache


def entries_bytes(prompt_cache: list[Any]) -> int:
    """Bytes of the keys and values of all caches, the rotating ones that stand for full ones too."""
    caches = zip(members(prompt_cache), layer_caches(prompt_cache))
    return sum(ours.kv_nbytes or (c.nbytes if hasattr(c, "max_size") else 0) for c, ours in caches)
