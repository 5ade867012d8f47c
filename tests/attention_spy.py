"""Record calls to MLX's attention, and compute the votes of their softmax."""

import mlx.core as mx
import numpy as np
import reference
from mlx_lm.models.cache import make_prompt_cache

from mlx_snapkv.caches.layers import attention_layers
from mlx_snapkv.engine.request import Request
from mlx_snapkv.planning.config import CompressionConfig
from mlx_snapkv.planning.request_plan import plan_request
from mlx_snapkv.planning.settings import resolve_setting


def softmax_votes(call, n, kv_head_of):
    """Return the votes `(n_kv_heads, T)` of a call's last `n` queries, in float64.

    `kv_head_of` lists the KV head of each query head.
    """
    logits = logits_of(call, n)
    T = logits.shape[-1]
    logits[:, np.arange(T) > np.arange(T - n, T)[:, None]] = -np.inf
    by_head = reference.softmax(logits, call["sinks"]).sum(axis=1)
    heads = np.array(kv_head_of)
    return np.stack([by_head[heads == head].mean(axis=0) for head in range(heads.max() + 1)])


def logits_of(call, n):
    """Return the logits `(n_heads, n, T)` of a call's last `n` queries, in float64.

    A numeric mask contains positional scores, which are added. Capped scores are returned as recorded.
    """
    if "scores" in call:
        return np.array(call["scores"][0].flatten(0, 1), np.float64)[:, -n:]
    queries, keys = (np.array(call[name].astype(mx.float32), np.float64)[0] for name in ("q", "k"))
    keys = keys.repeat(len(queries) // len(keys), axis=0)
    logits = queries[:, -n:] @ keys.swapaxes(-1, -2) * call["scale"]
    if isinstance(call["mask"], mx.array) and call["mask"].dtype != mx.bool_:
        logits = logits + np.array(call["mask"].astype(mx.float32))[0, :, -n:]
    return logits


def heads_read(layer, call, rows):
    """Return the KV head that each query head reads: the head of the cache whose `rows` equal the call's keys."""
    n_heads, n_keys, heads = call["q"].shape[1], call["k"].shape[1], range(rows.shape[1])
    if layer.latent:
        return [0] * n_heads
    read = [call["k"][:, j * n_keys // n_heads] for j in range(n_heads)]
    return [next(h for h in heads if mx.array_equal(rows[:, h], keys)) for keys in read]


def read_and_spy(model, tokens, policy, monkeypatch):
    """Read a prompt in two chunks on recording caches. Return the request and the last chunk's attention calls.

    For models that compute their scores themselves, the inputs of the softmax are recorded instead.
    """
    calls = []
    attend, softmax = mx.fast.scaled_dot_product_attention, mx.softmax

    def spy(queries, keys, values, *, scale, mask=None, sinks=None):
        calls.append({"q": queries, "k": keys, "scale": scale, "sinks": sinks, "mask": mask})
        return attend(queries, keys, values, scale=scale, mask=mask, sinks=sinks)

    def spy_scores(scores, *args, **kwargs):
        calls.append({"scores": scores})
        return softmax(scores, *args, **kwargs)

    cache = make_prompt_cache(model)
    request = Request(
        model,
        plan_request(model, CompressionConfig(resolve_setting(policy=policy)), tokens.size, cache),
        cache,
    )
    with request.recording(), monkeypatch.context() as patched:
        if any(layer.logit_cap for layer in attention_layers(model, cache)):
            patched.setattr(mx, "softmax", spy_scores)
        patched.setattr(mx.fast, "scaled_dot_product_attention", spy)
        model(tokens[None, :30], cache=request.caches)
        calls.clear()
        model(tokens[None, 30:], cache=request.caches)
    return request, calls


def calls_of(layer, cache, calls):
    """Return one call for each reader of a layer: the call with the queries that the cache recorded.

    Calls on latents and capped scores don't show the queries, so they are taken in layer order.
    """
    parts = mx.split(cache.queries, len(layer.readers), axis=1)
    if layer.latent:
        return [calls.pop(0) for _ in parts]
    if layer.logit_cap:
        own = {"k": cache.held().keys, "scale": layer.attention.scale, "sinks": None}
        return [calls.pop(0) | own | {"q": part} for part in parts]
    return [next(c for c in calls if mx.array_equal(c["q"][:, :, -8:], part)) for part in parts]
