"""Whether a loaded prompt cache fits a model."""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from ..errors import SnapKVError
from .adapter import layer_cache
from .contract import LayerCache
from .layers import attention_layers, layer_caches, members, slots, token_caches

# What may stand where the model has a plain cache of keys and values.
_INSTEAD = (KVCache, RotatingKVCache, QuantizedKVCache, LayerCache)


def require_match(prompt_cache: list, model) -> None:
    """Raises: SnapKVError: the caches don't have the model's layers, kinds, heads, head size and dtype."""
    found, wanted = slots(prompt_cache), slots(token_caches(model))
    if [slot[:2] for slot in found] != [slot[:2] for slot in wanted]:
        raise SnapKVError(f"it has {len(found)} caches, the model {len(wanted)}, or in other lists")
    for n, ((*_, cache), (*_, like)) in enumerate(zip(found, wanted)):
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
    if any(cache.needs_layer for cache in layer_caches(prompt_cache)):
        for layer in attention_layers(model, prompt_cache):
            if layer.entries_in(prompt_cache).needs_layer:
                layer.cache_in(prompt_cache).layer = layer


def problem_of(cache: Any, like: Any) -> str | None:
    """What is wrong with a cache from a file; None if nothing. `like` is mlx-lm's of the layer, after one token."""
    instead = type(like) is KVCache and isinstance(cache, _INSTEAD)
    if type(cache) is not type(like) and not instead:
        return f"is where the model has a {type(like).__name__}"
    if cache.empty() or like.empty():
        return None if cache.empty() == like.empty() else "holds other tokens than other caches"
    if not isinstance(cache, _INSTEAD):
        return _difference(cache.state, like.state, exact=hasattr(cache, "cache"))
    found = layer_cache(cache)
    if (how := found.quantization) is not None:
        like = like.to_quantized(how.group_size, how.bits)
    return _difference(found.sample, (like.keys, like.values)) or found.validate()


def _difference(found: Any, wanted: Any, exact: bool = False) -> str | None:
    """The first array that differs in dtype or shape; unless `exact`, the number of rows may."""
    have, want = _forms(found, exact), _forms(wanted, exact)
    differ = (n for n in sorted(have.keys() | want.keys()) if have.get(n) != want.get(n))
    return next((f"holds {have.get(n)} where the model has {want.get(n)}" for n in differ), None)


def _forms(tree: Any, exact: bool) -> dict[str, str]:
    """By array of a tree, its dtype and shape, without the number of rows unless `exact`."""
    arrays = {n: x for n, x in dict(tree_flatten(tree)).items() if isinstance(x, mx.array)}
    shapes = {n: x.shape if exact else x.shape[:-2] + x.shape[-1:] for n, x in arrays.items()}
    return {n: f"{x.dtype} {shapes[n]}".removeprefix("mlx.core.") for n, x in arrays.items()}
