"""Make prompt caches whose entries are in a store, move entries to a store, and prepare caches to be saved."""

import os
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
from ..entries.quantization import Quantization, fitting_groups
from ..errors import Option, OptionError, SnapKVError
from .stored_cache import StoredKVCache
from .stores import STORES, Store


def require_store(store: str | None, folder: str | None = None) -> None:
    """Check a store's name and folder. Raises: SnapKVError: no such store, or the folder is not writable."""
    if folder is not None and not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
        raise OptionError("store_dir", "a writable folder", folder)
    if store is not None and store not in STORES:
        *most, last = STORES
        raise OptionError("store", f"{', '.join(most)} or {last}", store)


def in_files(store: str | None) -> bool:
    """Return whether a store of this name keeps entries in files."""
    return store is not None and STORES[store].in_files


def make_caches(model, store: str | None, folder: str | None = None) -> list:
    """Return a model's empty caches; with a store its full-attention layers keep all entries there.

    Args:
        model: an mlx-lm model.
        store: name of the store; None for mlx-lm's own caches.
        folder: folder of a store's temporary files; None is TMPDIR.

    Raises:
        SnapKVError: the model's entries can't be kept that way.
        UnsupportedModelError: its entries can't be compressed.
    """
    caches = make_prompt_cache(model)
    if store is None:
        return caches
    layers = attention_layers(model, caches)
    kind = STORES[store]
    quantization = store_quantization(model, layers, store)
    place: dict[str, Any] = {"folder": folder} if kind.in_files else {}
    for layer in layers:
        kept = kind(quantization, **place)
        layer.put(caches, StoredKVCache(0, 0, KVCache.step, layer, kept))
    return caches


def store_quantization(
    model, layers: list[AttentionLayer], store: str | None
) -> Quantization | None:
    """Return how a store packs entries, in groups of a size that divides the heads; None if it leaves them plain.

    Raises: SnapKVError: the model's entries can't be packed so.
    """
    if store is None or (bits := STORES[store].bits) is None:
        return None
    require_quantised_attention(layers, "give {}", Option("store", "memory"))
    groups = fitting_groups(head_sizes(model, layers), Option("store", store))
    return Quantization(bits, 64 if 64 in groups else 32)


def copied_to_store(model, prompt_cache: list, store: str, folder: str | None = None) -> list:
    """Return caches in a store that begin with a copy of a prompt cache's entries.

    Raises: SnapKVError: entries of the prompt cache were evicted, or the store can't keep this model's entries.
    """
    if is_compressed(prompt_cache):
        raise SnapKVError(
            "{} needs a prompt cache with all entries, and this one is compressed",
            Option("store", store),
        )
    empty = make_caches(model, store, folder)
    caches = copies_sharing_entries(prompt_cache, attention_layers(model, empty))
    move_entries(model, caches, into=empty)
    return caches


def move_entries(model, caches: list, *, into: list) -> None:
    """Move the entries of each full-attention layer into its empty cache of `into`, and put this cache into `caches`.

    Raises: SnapKVError: a layer's cache does not hold all entries.
    """
    for layer in attention_layers(model, into):
        layer.put(caches, _moved_into(layer.cache_in(into), layer.cache_in(caches)))


def lasting_forms(model, caches: list, store: str | None) -> list:
    """Return caches for a caller to continue with: mlx-lm's own, which have no index, unless entries are in files."""
    stays = in_files(store) or book_store(caches) is not None
    return caches if stays else saved_forms(model, caches)


def saved_forms(model, caches: list) -> list:
    """Return caches to write to a file: mlx-lm's own kinds, or a `StoredKVCache` if entries are in files."""
    forms = list(caches)
    if any(cache.converts_to_save for cache in layer_caches(caches)):
        for layer in attention_layers(model, caches):
            layer.put(forms, layer.entries_in(caches).saved_form())
    return forms


def plain_forms(model, caches: list) -> list:
    """Return caches that mlx-lm can batch: `KVCache` in memory for each layer whose entries are stored or packed."""
    forms = list(caches)
    for layer in attention_layers(model, caches):
        cache = layer.entries_in(caches)
        if cache.is_compressed or (cache.store is None and cache.quantization is None):
            continue
        plain: Any = KVCache()
        if cache.offset:
            plain = full_cache(cache.stored_entries().packed(None), cache.sparse_from)
        layer.put(forms, plain)
    return forms


def _moved_into(empty: Any, cache: Any) -> Any:
    """Move the entries of `cache` into `empty`, a cache of another kind, and return it.

    A cache that already is of this kind, or compressed, is returned as it is.

    Raises: SnapKVError: `cache` does not hold all entries.
    """
    wanted = layer_cache(empty)
    loaded = layer_cache(cache)
    if loaded.is_compressed or _alike(wanted.store, loaded.store):
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
        return full_cache(loaded.stored_entries().packed(None), loaded.sparse_from)
    empty.fill(
        loaded.stored_entries()
    )  # packed entries stay packed: quantising twice would lose more
    empty.sparse_from = loaded.sparse_from
    return empty


def _alike(a: Store | None, b: Store | None) -> bool:
    """Return whether entries of one store need not be moved to the other."""
    if a is None or b is None:
        return False
    return a.name == b.name and a.quantization == b.quantization


def book_store(caches: list) -> str | None:
    """Return the name of the store in files that these caches' entries are in; None if they are not in files."""
    return next((cache.store.name for cache in books(caches)), None)


def books(prompt_cache: list) -> list:
    """Return the caches whose entries are in files."""
    return [cache for cache in layer_caches(prompt_cache) if cache.in_files]
