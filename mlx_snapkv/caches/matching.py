"""Whether a loaded prompt cache fits a model."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from ..errors import SnapKVError
from .adapter import layer_cache
from .contract import LayerCache
from .evicting import EvictingCache
from .layers import attention_layers, layer_caches, members, token_caches

# What may stand where the model has a plain cache of keys and values.
_INSTEAD = (KVCache, RotatingKVCache, QuantizedKVCache, LayerCache)


def require_match(prompt_cache: list, model) -> None:
    """Raises: SnapKVError: the caches don't have the model's layers, kinds, heads, head size and dtype."""
    fresh = token_caches(model)
    _require_kinds(prompt_cache, fresh)
    for n, (cache, like) in enumerate(zip(members(prompt_cache), members(fresh))):
        try:
            problem = problem_of(cache, like)
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
    if any(isinstance(cache, EvictingCache) for cache in members(prompt_cache)):
        for layer in attention_layers(model, prompt_cache):
            cache = layer.cache_in(prompt_cache)
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


def problem_of(cache: Any, like: Any) -> str | None:
    """What is wrong with a cache from a file, in a few words; None if it is sound.

    Args:
        like: mlx-lm's cache of the same layer, after one token.
    """
    if cache.empty() != like.empty():
        return "is empty" if cache.empty() else "should be empty"
    if cache.empty():
        return None
    if not isinstance(cache, _INSTEAD):
        return _difference(cache.state, like.state, exact=hasattr(cache, "cache"))
    how, n = layer_cache(cache).quantization, layer_cache(cache).n_entries
    if how is not None:
        like = like.to_quantized(how.group_size, how.bits)
    stored = cache.keys, cache.values  # type: ignore[union-attr]
    problem = _difference(stored, (like.keys, like.values))
    numbers = {array.shape[2] for array in _arrays(stored).values()}
    if problem is None and len(numbers) > 1:
        problem = f"has {sorted(numbers)} rows of keys and values"
    if problem is None and not (type(cache.offset) is int and 0 < n <= min(numbers)):
        problem = "has numbers that contradict each other"
    if problem is None and isinstance(cache, EvictingCache):
        positions = np.sort(np.array(cache.positions).astype(int), axis=-1)
        sound = positions.shape[2] == n and (np.diff(positions) > 0).all()
        if not sound or positions.max() >= cache.offset:
            problem = "has positions that can't be"
    return problem


def _difference(found: Any, wanted: Any, exact: bool = False) -> str | None:
    """Arrays that differ in place, dtype or shape; unless `exact`, the number of rows may."""
    have, want = _arrays(found), _arrays(wanted)
    if have.keys() != want.keys():
        return "holds other arrays than the model's"
    for name, array in have.items():
        other = want[name]
        if array.dtype != other.dtype:
            return f"holds {array.dtype}, the model {other.dtype}".replace("mlx.core.", "")
        rows = None if exact else array.ndim - 2
        sizes = enumerate(zip(array.shape, other.shape))
        if array.ndim != other.ndim or any(n != m and axis != rows for axis, (n, m) in sizes):
            return f"holds an array of shape {array.shape}, the model {other.shape}"
    return None


def _arrays(tree: Any) -> dict[str, mx.array]:
    return {name: x for name, x in dict(tree_flatten(tree)).items() if isinstance(x, mx.array)}
