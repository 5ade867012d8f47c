"""Check that a loaded prompt cache fits a model."""

from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from ..errors import SnapKVError
from .adapter import layer_cache
from .contract import LayerCache
from .layers import all_caches, attention_layers, is_compressed, slots, token_caches

# Cache classes with entries. A loaded cache of one of these classes is accepted where the model has a `KVCache`.
KV_CACHE_CLASSES = (KVCache, RotatingKVCache, QuantizedKVCache, LayerCache)


def require_match(prompt_cache: list, model) -> None:
    """Check that a prompt cache fits a model.

    These must match: the number and classes of the caches (for exceptions, see `KV_CACHE_CLASSES`), and the number of
    heads, head size and dtype of their entries.

    Raises: SnapKVError: the prompt cache does not fit.
    """
    loaded_slots = slots(prompt_cache)
    model_slots = slots(token_caches(model))
    loaded_places = [(slot.cache_index, slot.member) for slot in loaded_slots]
    model_places = [(slot.cache_index, slot.member) for slot in model_slots]
    if loaded_places != model_places:
        n_loaded, n_model = len(loaded_slots), len(model_slots)
        if n_loaded == n_model:
            raise SnapKVError(f"its {n_loaded} caches are not grouped like the model's")
        raise SnapKVError(f"it has {n_loaded} caches, and the model has {n_model}")
    for number, (loaded_slot, model_slot) in enumerate(zip(loaded_slots, model_slots)):
        try:
            problem = mismatch(loaded_slot.cache, model_slot.cache)
        except Exception:  # the loaded state does not fit the class
            problem = "holds something other than its class says"
        if problem is not None:
            class_name = type(loaded_slot.cache).__name__
            raise SnapKVError(f"cache {number}, a {class_name}, {problem}")


def require_tokens(prompt_cache: list, n_tokens: int | None) -> None:
    """Check that every layer has read `n_tokens` tokens.

    If `n_tokens` is None, check only that all layers have read the same number of tokens.

    Raises: SnapKVError: the numbers differ, or no token has been read.
    """
    nonempty_caches = [cache for cache in all_caches(prompt_cache) if not cache.empty()]
    # Linear layers don't count tokens.
    counting_caches = [cache for cache in nonempty_caches if isinstance(cache, KV_CACHE_CLASSES)]
    token_counts = sorted({cache.offset for cache in counting_caches})
    if len(token_counts) > 1:
        raise SnapKVError(f"its layers hold different numbers of tokens: {token_counts}")
    if n_tokens == 0 or not nonempty_caches:
        raise SnapKVError("it holds no tokens")
    if token_counts and n_tokens is not None and token_counts != [n_tokens]:
        raise SnapKVError(f"its layers hold {token_counts[0]} tokens, the prompt has {n_tokens}")


def set_missing_layers(prompt_cache: list, model) -> None:
    """Set the `layer` attribute of all compressed caches, because it is not saved in files."""
    if not is_compressed(prompt_cache):
        return
    for layer in attention_layers(model, prompt_cache):
        if layer.layer_cache_in(prompt_cache).is_compressed:
            layer.cache_in(prompt_cache).layer = layer


def mismatch(cache: Any, model_cache: Any) -> str | None:
    """Describe how a loaded cache differs from the model's own, or return None if it fits.

    Args:
        cache: the loaded cache.
        model_cache: the model's own cache for the layer, after one token.
    """
    has_same_class = type(cache) is type(model_cache)
    may_replace_model_cache = type(model_cache) is KVCache and isinstance(cache, KV_CACHE_CLASSES)
    if not has_same_class and not may_replace_model_cache:
        return f"is where the model has a {type(model_cache).__name__}"
    if cache.empty() or model_cache.empty():
        if cache.empty() == model_cache.empty():
            return None
        return (
            "is empty, unlike the model's" if cache.empty() else "is not empty, unlike the model's"
        )
    if not isinstance(cache, KV_CACHE_CLASSES):
        is_arrays_cache = hasattr(cache, "cache")
        # Compare rows only for an `ArraysCache`, whose shapes don't depend on the number of tokens.
        return _array_mismatch(cache.state, model_cache.state, compares_rows=is_arrays_cache)
    loaded_cache = layer_cache(cache)
    quantization = loaded_cache.quantization
    if quantization is not None:
        model_cache = model_cache.to_quantized(quantization.group_size, quantization.bits)
    model_entries = (model_cache.keys, model_cache.values)
    return _array_mismatch(loaded_cache.sample_entries, model_entries) or loaded_cache.validate()


def _array_mismatch(
    loaded_arrays: Any, model_arrays: Any, compares_rows: bool = False
) -> str | None:
    """Describe the first array whose dtype or shape differs, or return None if all match.

    The number of rows is ignored unless `compares_rows` is true.
    """
    loaded_formats = _formats_by_path(loaded_arrays, compares_rows)
    model_formats = _formats_by_path(model_arrays, compares_rows)
    for path in sorted(loaded_formats.keys() | model_formats.keys()):
        loaded_format, model_format = loaded_formats.get(path), model_formats.get(path)
        if loaded_format != model_format:
            return f"holds {loaded_format} where the model has {model_format}"
    return None


def _formats_by_path(tree: Any, includes_rows: bool) -> dict[str, str]:
    """Map the path of each array in a tree to a string with the array's dtype and shape.

    If `includes_rows` is false, the shape leaves out the number of rows.
    """
    formats: dict[str, str] = {}
    for path, leaf in dict(tree_flatten(tree)).items():
        if isinstance(leaf, mx.array):
            shape = leaf.shape
            if not includes_rows:
                shape = shape[:-2] + shape[-1:]  # all axes but the rows
            formats[path] = f"{leaf.dtype} {shape}".removeprefix("mlx.core.")
    return formats
