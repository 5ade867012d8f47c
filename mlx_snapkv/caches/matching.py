"""Checks that a loaded prompt cache fits a model."""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from ..errors import SnapKVError
from .adapter import layer_cache
from .contract import LayerCache
from .layers import attention_layers, layer_caches, members, slots, token_caches

# Types that may replace a `KVCache` of the model.
_REPLACES_KV_CACHE = (KVCache, RotatingKVCache, QuantizedKVCache, LayerCache)


def require_match(prompt_cache: list, model) -> None:
    """Check layers, kinds, heads, head size and dtype of the caches. Raises: SnapKVError: they are not the model's."""
    loaded, wanted = slots(prompt_cache), slots(token_caches(model))
    if [slot[:2] for slot in loaded] != [slot[:2] for slot in wanted]:
        raise SnapKVError(
            f"it has {len(loaded)} caches, the model {len(wanted)}, or in other lists"
        )
    for n, ((*_, cache), (*_, like)) in enumerate(zip(loaded, wanted)):
        try:
            problem = problem_of(cache, like)
        except Exception:  # the state is not one of this class
            problem = "holds something else than its class says"
        if problem is not None:
            raise SnapKVError(f"cache {n}, a {type(cache).__name__}, {problem}")


def require_tokens(prompt_cache: list, n_tokens: int | None) -> None:
    """Check the number of tokens. Raises: SnapKVError: layers hold different numbers, or not `n_tokens`."""
    filled = [c for c in members(prompt_cache) if not c.empty()]
    counts = sorted({c.offset for c in filled if isinstance(c, _REPLACES_KV_CACHE)})
    if len(counts) > 1:
        raise SnapKVError(f"its layers hold different numbers of tokens: {counts}")
    if n_tokens == 0 or not filled:
        raise SnapKVError("it holds no tokens")
    if counts and n_tokens is not None and counts != [n_tokens]:
        raise SnapKVError(f"its layers hold {counts[0]} tokens, the prompt has {n_tokens}")


def n_tokens(prompt_cache: list) -> int:
    """Return the number of tokens that a prompt cache has read; 0 if it does not say."""
    return max((cache.offset for cache in layer_caches(prompt_cache)), default=0)


def adopt(prompt_cache: list, model) -> None:
    """Set the `layer` of caches that came from a file."""
    if any(cache.needs_layer for cache in layer_caches(prompt_cache)):
        for layer in attention_layers(model, prompt_cache):
            if layer.entries_in(prompt_cache).needs_layer:
                layer.cache_in(prompt_cache).layer = layer


def problem_of(cache: Any, like: Any) -> str | None:
    """Return what is wrong with a loaded cache; None if nothing. `like` is the model's own cache after one token."""
    replaces = type(like) is KVCache and isinstance(cache, _REPLACES_KV_CACHE)
    if type(cache) is not type(like) and not replaces:
        return f"is where the model has a {type(like).__name__}"
    if cache.empty() or like.empty():
        return None if cache.empty() == like.empty() else "holds other tokens than other caches"
    if not isinstance(cache, _REPLACES_KV_CACHE):
        return _difference(cache.state, like.state, exact=hasattr(cache, "cache"))
    loaded = layer_cache(cache)
    if (how := loaded.quantization) is not None:
        like = like.to_quantized(how.group_size, how.bits)
    return _difference(loaded.sample, (like.keys, like.values)) or loaded.validate()


def _difference(loaded: Any, wanted: Any, exact: bool = False) -> str | None:
    """Describe the first array that differs in dtype or shape; numbers of rows are compared only if `exact`."""
    have, want = _forms(loaded, exact), _forms(wanted, exact)
    differ = (n for n in sorted(have.keys() | want.keys()) if have.get(n) != want.get(n))
    return next((f"holds {have.get(n)} where the model has {want.get(n)}" for n in differ), None)


def _forms(tree: Any, exact: bool) -> dict[str, str]:
    """Return dtype and shape of each array of a tree by its path, without the number of rows unless `exact`."""
    arrays = {n: x for n, x in dict(tree_flatten(tree)).items() if isinstance(x, mx.array)}
    shapes = {n: x.shape if exact else x.shape[:-2] + x.shape[-1:] for n, x in arrays.items()}
    return {n: f"{x.dtype} {shapes[n]}".removeprefix("mlx.core.") for n, x in arrays.items()}
