"""Build prompt caches that keep their entries in a store, and convert caches from one store to another."""

from typing import Any

from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..caches.adapter import full_cache, has_all_entries, layer_cache
from ..caches.contract import LayerCache
from ..caches.layers import (
    AttentionLayer,
    attention_layers,
    copies_sharing_entries,
    head_sizes,
    is_compressed,
    layer_caches,
    map_caches,
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


def reads_sparsely(sparse: Sparse) -> bool:
    """Return whether prompt chunks choose the entries that they read."""
    if sparse.read is None:
        return in_files(sparse.store) or sparse.read_top_k is not None
    return sparse.read == "sparse"


def make_caches(model, sparse: Sparse | None) -> list:
    """Build empty caches for a model.

    If `sparse` is given, the caches of full-attention layers use the store that it names.

    Args:
        model: an mlx-lm model.
        sparse: options of sparse attention, including the store and its folder. None builds mlx-lm's own caches.

    Raises:
        SnapKVError: the store does not support the model.
        UnsupportedModelError: the model can't be compressed, or has no full-attention layer.
    """
    caches = make_prompt_cache(model)
    if sparse is None:
        return caches
    layers = attention_layers(model, caches)
    store_class = STORES[sparse.store]
    quantization = store_quantization(model, layers, sparse.store)
    folder_option: dict[str, Any] = {"folder": sparse.store_dir} if store_class.in_files else {}
    for layer in layers:
        store = store_class(quantization, **folder_option)
        layer.put(caches, StoredKVCache(layer, store))
    return caches


def store_quantization(
    model, layers: list[AttentionLayer], store: str | None
) -> Quantization | None:
    """Return the quantisation that a store uses for a model, or None if its entries are plain.

    Raises: SnapKVError: the store can't quantise the model's entries.
    """
    bits = None if store is None else STORES[store].bits
    if bits is None:
        return None
    require_quantised_attention(layers, "give {}", Option("store", "memory"))
    group_sizes = fitting_group_sizes(head_sizes(model, layers), Option("store", store))
    group_size = 64 if 64 in group_sizes else 32
    return Quantization(bits, group_size)


def copy_to_store(model, prompt_cache: list, sparse: Sparse) -> list:
    """Copy a prompt cache's entries to the store of `sparse`, and return the new caches.

    Full-attention caches that already use the same kind of store are shared with the original.

    Raises: SnapKVError: the prompt cache is compressed or is missing entries, or the store does not support the model
        or can't be written.
    """
    if is_compressed(prompt_cache):
        raise SnapKVError(
            "{} needs a prompt cache with all entries, and this one is compressed",
            Option("store", sparse.store),
        )
    empty_caches = make_caches(model, sparse)
    caches = copies_sharing_entries(prompt_cache, attention_layers(model, empty_caches))
    move_entries(model, caches, into=empty_caches)
    return caches


def move_entries(model, caches: list, *, into: list) -> None:
    """Move the entries of full-attention layers from `caches` to the stores of the empty caches `into`.

    In `caches`, the cache of each of these layers is replaced by the one that received its entries. A compressed cache
    is not replaced, nor is a cache whose store has the same name and quantisation as the layer's store in `into`.

    Raises: SnapKVError: a layer's cache is missing entries, or a store in `into` can't be written.
    """
    for layer in attention_layers(model, into):
        target_cache = layer.cache_in(into)
        layer.put(caches, _cache_after_move(layer.cache_in(caches), target_cache))


def caches_to_save(prompt_cache: list) -> list:
    """Return caches that can be saved to a file, and extended with new tokens after loading.

    Compressed caches and `StoredKVCache`s with entries in files are returned as they are. Any other cache is converted
    to one of mlx-lm's own.
    """
    return map_caches(lambda cache: layer_cache(cache).cache_to_save(), prompt_cache)


def caches_to_batch(prompt_cache: list) -> list:
    """Return caches that can be batched.

    A cache whose entries are in a store or quantised is replaced by a `KVCache` with the dequantised entries. Other
    caches are returned as they are, and so are compressed ones, even if they are quantised.
    """

    def cache_to_batch(cache: Any) -> Any:
        source = layer_cache(cache)
        is_plain = source.store is None and source.quantization is None
        if source.is_compressed or is_plain:
            return cache
        return _plain_cache(source) if source.offset > 0 else KVCache()

    return map_caches(cache_to_batch, prompt_cache)


def _plain_cache(cache: LayerCache) -> Any:
    """Return an mlx-lm cache with the dequantised entries of `cache`."""
    return full_cache(cache.stored_entries().with_quantization(None), cache.sparse_from)


def _cache_after_move(cache: Any, empty_cache: Any) -> Any:
    """Move the entries of `cache` to `empty_cache`, and return whichever cache has the entries afterwards.

    If `cache` is compressed, or its store has the same name and quantisation as the store of `empty_cache`, its entries
    stay where they are.

    Raises: SnapKVError: `cache` does not have all entries, or the store of `empty_cache` can't be written.
    """
    source = layer_cache(cache)
    new_store, old_store = layer_cache(empty_cache).store, source.store
    if source.is_compressed or _is_same_store(new_store, old_store):
        if new_store is not None and old_store is not None:
            old_store.folder = new_store.folder  # for files created from now on
        return cache
    if not has_all_entries(cache):
        raise SnapKVError(
            f"its {type(cache).__name__} has no entries that a policy can choose among: load it without a policy"
        )
    if source.offset == 0:
        return empty_cache
    if new_store is None:
        return _plain_cache(source)
    # Move the entries as stored, because dequantising and quantising them again would lose precision.
    empty_cache.fill(source.stored_entries())
    empty_cache.sparse_from = source.sparse_from
    return empty_cache


def _is_same_store(store: Store | None, other: Store | None) -> bool:
    """Return whether two stores have the same name and quantisation. If so, entries need not be moved."""
    if store is None or other is None:
        return False
    return store.name == other.name and store.quantization == other.quantization


def caches_in_files(prompt_cache: list) -> list:
    """Return the caches whose entries are in files."""
    return [cache for cache in layer_caches(prompt_cache) if cache.in_files]
