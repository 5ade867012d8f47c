"""Whether a loaded prompt cache fits a model."""

from collections.abc import Sequence

import mlx.core as mx
from mlx_lm.models.cache import (
    CacheList,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)

from ..errors import SnapKVError
from .adapter import layer_cache
from .contract import LayerCache
from .evicting import EvictingCache
from .layers import attention_layers, layer_caches, members

# What may stand where the model has a plain cache of keys and values.
_INSTEAD = (KVCache, RotatingKVCache, QuantizedKVCache, LayerCache)


def require_match(prompt_cache: list, model) -> None:
    """Raises: SnapKVError: the caches don't have the model's layers, kinds, heads, head size and dtype."""
    fresh = make_prompt_cache(model)
    model(mx.array([[0]]), cache=fresh)
    _require_kinds(prompt_cache, fresh)
    pairs = zip(members(prompt_cache), members(fresh))
    for n, (cache, like) in enumerate(pairs):
        try:
            problem = _problem(cache, like)
        except Exception:  # a state of another kind than the class keeps
            problem = "holds something else than its class says"
        if problem is not None:
            raise SnapKVError(f"cache {n}, a {type(cache).__name__}, {problem}")


def require_tokens(prompt_cache: list, n_tokens: int | None) -> None:
    """Raises: SnapKVError: the layers hold different numbers of tokens, or not `n_tokens`."""
    filled = [c for c in members(prompt_cache) if not c.empty()]
    counts = sorted({c.offset for c in filled if isinstance(c, _INSTEAD)})
    if len(counts) > 1:
        raise SnapKVError(f"its layers hold different numbers of tokens: {counts}")
    if n_tokens == 0 or not filled:
        raise SnapKVError("it holds no tokens")
    if counts and n_tokens is not None and counts != [n_tokens]:
        raise SnapKVError(f"its layers hold {counts[0]} tokens, the prompt has {n_tokens}")


def n_tokens(prompt_cache: list) -> int:
    """Tokens that a prompt cache has read; 0 if it does not say."""
    return max((cache.offset for cache in layer_caches(prompt_cache)), default=0)


def adopt(prompt_cache: list, model) -> None:
    """Tell caches that came from a file which layers they serve."""
    if any(isinstance(cache, EvictingCache) for cache in layer_caches(prompt_cache)):
        for layer in attention_layers(model, prompt_cache):
            cache = layer.entries_in(prompt_cache)
            if isinstance(cache, EvictingCache):
                cache.layer = layer


def _require_kinds(found: Sequence, wanted: Sequence) -> None:
    if len(found) != len(wanted):
        raise SnapKVError(f"it has {len(found)} caches, the model has {len(wanted)}")
    for cache, like in zip(found, wanted):
        same = type(cache) is type(like)
        if not same and not (type(like) is KVCache and isinstance(cache, _INSTEAD)):
            raise SnapKVError(
                f"it has a {type(cache).__name__} where the model has a {type(like).__name__}"
            )
        if isinstance(cache, CacheList):
            _require_kinds(cache.caches, like.caches)


def _problem(cache, like) -> str | None:
    """What is wrong with a cache that should hold what `like` holds, with more tokens."""
    if cache.empty() != like.empty():
        return "is empty" if cache.empty() else "should be empty"
    return None if cache.empty() else layer_cache(cache).validate(like)
