"""Check that a loaded prompt cache fits a model."""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from ..errors import SnapKVError
from .adapter import layer_cache
from .contract import LayerCache
from .layers import all_caches, attention_layers, layer_caches, slots, token_caches

# Classes that may replace a model's `KVCache`.
_REPLACES_KV_CACHE = (KVCache, RotatingKVCache, QuantizedKVCache, LayerCache)


def require_match(prompt_cache: list, model) -> None:
    """Check that a prompt cache has the number, classes, heads, head size and dtype that the model needs.

    Raises: SnapKVError: the prompt cache does not fit the model.
    """
    loaded = slots(prompt_cache)
    wanted = slots(token_caches(model))
    if [slot[:2] for slot in loaded] != [slot[:2] for slot in wanted]:
        raise SnapKVError(
            f"it has {len(loaded)} caches, the model {len(wanted)}, or in other lists"
        )
    pairs = zip(all_caches(prompt_cache), (cache for _, _, cache in wanted))
    for number, (cache, model_cache) in enumerate(pairs):
        try:
            problem = problem_of(cache, model_cache)
        except Exception:  # the loaded state does not fit the class
            problem = "holds something else than its class says"
        if problem is not None:
            raise SnapKVError(f"cache {number}, a {type(cache).__name__}, {problem}")


def require_tokens(prompt_cache: list, n_tokens: int | None) -> None:
    """Check that all layers have read the same number of tokens, and exactly `n_tokens` unless it is None.

    Raises: SnapKVError: the numbers differ, or no token has been read.
    """
    filled = [cache for cache in all_caches(prompt_cache) if not cache.empty()]
    # Linear layers don't count tokens.
    with_entries = [cache for cache in filled if isinstance(cache, _REPLACES_KV_CACHE)]
    counts = sorted({cache.offset for cache in with_entries})
    if len(counts) > 1:
        raise SnapKVError(f"its layers hold different numbers of tokens: {counts}")
    if n_tokens == 0 or not filled:
        raise SnapKVError("it holds no tokens")
    if counts and n_tokens is not None and counts != [n_tokens]:
        raise SnapKVError(f"its layers hold {counts[0]} tokens, the prompt has {n_tokens}")


def n_tokens(prompt_cache: list) -> int:
    """Return the number of tokens that a prompt cache has read, or 0 if none of its caches counts tokens."""
    return max((cache.offset for cache in layer_caches(prompt_cache)), default=0)


def set_missing_layers(prompt_cache: list, model) -> None:
    """Set `layer` on caches that were loaded from a file and need it."""
    if any(cache.needs_layer for cache in layer_caches(prompt_cache)):
        for layer in attention_layers(model, prompt_cache):
            if layer.layer_cache_in(prompt_cache).needs_layer:
                layer.cache_in(prompt_cache).layer = layer


def problem_of(cache: Any, model_cache: Any) -> str | None:
    """Describe how a loaded cache differs from the model's own, or return None if it fits.

    Args:
        cache: the loaded cache.
        model_cache: the model's own cache for the layer, after one token.
    """
    replaces = type(model_cache) is KVCache and isinstance(cache, _REPLACES_KV_CACHE)
    if type(cache) is not type(model_cache) and not replaces:
        return f"is where the model has a {type(model_cache).__name__}"
    if cache.empty() or model_cache.empty():
        both_empty = cache.empty() == model_cache.empty()
        return None if both_empty else "holds other tokens than other caches"
    if not isinstance(cache, _REPLACES_KV_CACHE):
        # The shape of an `ArraysCache` does not depend on the number of tokens.
        return _difference(cache.state, model_cache.state, exact=hasattr(cache, "cache"))
    loaded = layer_cache(cache)
    quantization = loaded.quantization
    if quantization is not None:
        model_cache = model_cache.to_quantized(quantization.group_size, quantization.bits)
    wanted = (model_cache.keys, model_cache.values)
    return _difference(loaded.sample_entries, wanted) or loaded.validate()


def _difference(loaded: Any, wanted: Any, exact: bool = False) -> str | None:
    """Describe the first array whose dtype or shape differs. The number of rows only matters if `exact`."""
    loaded_forms = _forms(loaded, exact)
    wanted_forms = _forms(wanted, exact)
    for path in sorted(loaded_forms.keys() | wanted_forms.keys()):
        loaded_form, wanted_form = loaded_forms.get(path), wanted_forms.get(path)
        if loaded_form != wanted_form:
            return f"holds {loaded_form} where the model has {wanted_form}"
    return None


def _forms(tree: Any, exact: bool) -> dict[str, str]:
    """Return the dtype and shape of each array in a tree, by path. Leave out the number of rows unless `exact`."""
    forms: dict[str, str] = {}
    for path, x in dict(tree_flatten(tree)).items():
        if isinstance(x, mx.array):
            shape = x.shape if exact else x.shape[:-2] + x.shape[-1:]
            forms[path] = f"{x.dtype} {shape}".removeprefix("mlx.core.")
    return forms
