"""Build prompt caches that keep their entries in a store, and convert caches from one store to another."""

from typing import Any

from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..caches.adapter import full_cache, has_all_entries, layer_cache
from ..caches.layers import (
    AttentionLayer,
    attention_layers,
    copies_sharing_entries,
    head_sizes,
    is_compressed,
    layer_caches,
    require_quantised_attention,
)
from ..entries.quantization import Quantization, fitting_group_sizes
from ..errors import Option, SnapKVError
from .options import Sparse
from .stored_cache import StoredKVCache
from .stores import STORES, Store


def in_files(store: str | None) -> bool:
    """Return whether the store named `store` keeps entries in files."""
    return store is not None and STORES[store].in_files


def make_caches(model, sparse: Sparse | None) -> list:
    """Build empty caches for a model. With sparse attention, the caches of full-attention layers use its store.

    Args:
        model: an mlx-lm model.
        sparse: options of sparse attention, including the store and its folder. None builds mlx-lm's own caches.

    Raises:
        SnapKVError: the store does not support the model.
        UnsupportedModelError: models of this type can't be compressed.
    """
    caches = make_prompt_cache(model)
    if sparse is None:
        return caches
    layers = attention_layers(model, caches)
    store = STORES[sparse.store]
    quantization = store_quantization(model, layers, sparse.store)
    folder_option: dict[str, Any] = {"folder": sparse.store_dir} if store.in_files else {}
    for layer in layers:
        layer_store = store(quantization, **folder_option)
        layer.put(caches, StoredKVCache(0, 0, KVCache.step, layer, layer_store))
    return caches


def store_quantization(
    model, layers: list[AttentionLayer], store: str | None
) -> Quantization | None:
    """Return the quantisation that a store uses for a model, or None if its entries are plain.

    Raises: SnapKVError: the store can't quantise the model's entries.
    """
    if store is None or (bits := STORES[store].bits) is None:
        return None
    require_quantised_attention(layers, "give {}", Option("store", "memory"))
    groups = fitting_group_sizes(head_sizes(model, layers), Option("store", store))
    return Quantization(bits, 64 if 64 in groups else 32)


def copy_to_store(model, prompt_cache: list, sparse: Sparse) -> list:
    """Copy a prompt cache's entries to the store of `sparse`, and return the new caches.

    Raises: SnapKVError: the prompt cache is compressed, or the store does not support the model.
    """
    if is_compressed(prompt_cache):
        raise SnapKVError(
            "{} needs a prompt cache with all entries, and this one is compressed",
            Option("store", sparse.store),
        )
    empty = make_caches(model, sparse)
    caches = copies_sharing_entries(prompt_cache, attention_layers(model, empty))
    move_entries(model, caches, into=empty)
    return caches


def move_entries(model, caches: list, *, into: list) -> None:
    """Replace the caches of full-attention layers in `caches` with those in `into`, and move the entries there.

    Raises: SnapKVError: a layer's cache does not have all entries.
    """
    for layer in attention_layers(model, into):
        layer.put(caches, _move_into(layer.cache_in(into), layer.cache_in(caches)))


def caches_to_continue(model, caches: list, store: str | None) -> list:
    """Return caches from which a caller can continue: mlx-lm's own, or `StoredKVCache`s if entries are in files."""
    are_in_files = in_files(store) or file_store_of(caches) is not None
    return caches if are_in_files else caches_to_save(model, caches)


def caches_to_save(model, caches: list) -> list:
    """Return caches that can be saved: mlx-lm's own, or `StoredKVCache`s if entries are in files."""
    forms = list(caches)
    if any(cache.converts_to_save for cache in layer_caches(caches)):
        for layer in attention_layers(model, caches):
            layer.put(forms, layer.layer_cache_in(caches).cache_to_save())
    return forms


def caches_to_batch(model, caches: list) -> list:
    """Return caches that mlx-lm can batch. Stored and quantised entries are unpacked into a `KVCache`."""
    forms = list(caches)
    for layer in attention_layers(model, caches):
        cache = layer.layer_cache_in(caches)
        if cache.is_compressed or (cache.store is None and cache.quantization is None):
            continue
        plain: Any = KVCache()
        if cache.offset:
            plain = full_cache(cache.stored_entries().with_quantization(None), cache.sparse_from)
        layer.put(forms, plain)
    return forms


def _move_into(empty: Any, cache: Any) -> Any:
    """Move the entries of `cache` to `empty`, and return whichever cache has the entries afterwards.

    If `cache` is compressed, or already uses the same store, its entries stay where they are.

    Raises: SnapKVError: `cache` does not have all entries.
    """
    wanted = layer_cache(empty)
    loaded = layer_cache(cache)
    if loaded.is_compressed or _is_same_store(wanted.store, loaded.store):
        if wanted.store is not None and loaded.store is not None:
            loaded.store.folder = wanted.store.folder
        return cache
    if not has_all_entries(cache):
        raise SnapKVError(
            f"its {type(cache).__name__} has no entries that a policy can choose among: load it without a policy"
        )
    if loaded.offset == 0:
        return empty
    if wanted.store is None:
        return full_cache(loaded.stored_entries().with_quantization(None), loaded.sparse_from)
    empty.fill(loaded.stored_entries())  # not dequantised: quantising twice would lose precision
    empty.sparse_from = loaded.sparse_from
    return empty


def _is_same_store(a: Store | None, b: Store | None) -> bool:
    """Return whether two stores have the same name and quantisation, so that entries can stay where they are."""
    if a is None or b is None:
        return False
    return a.name == b.name and a.quantization == b.quantization


def file_store_of(caches: list) -> str | None:
    """Return the name of the caches' store if it keeps entries in files, otherwise None."""
    return next((cache.store.name for cache in books(caches)), None)


def books(prompt_cache: list) -> list:
    """Return the caches whose entries are in files."""
    return [cache for cache in layer_caches(prompt_cache) if cache.in_files]
