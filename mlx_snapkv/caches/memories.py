"""The values of `memory`: which store keeps all entries, and how a prompt cache is moved into it."""

from typing import Any, TypeGuard

from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..entries.quantization import Quantization, fitting_groups
from ..errors import Option, OptionError, SnapKVError
from .adapter import full_cache, has_all_entries, layer_cache, take_notes
from .layers import (
    AttentionLayer,
    attention_layers,
    copies_but_entries,
    head_sizes,
    is_compressed,
    layer_caches,
    require_quantised_attention,
)
from .recording import RecordingKVCache
from .stores import STORES, Store

BITS = "8bit", "4bit"
MEMORIES = (
    "drop",
    *(":".join(filter(None, ("recall", name, bits))) for name in STORES for bits in ("", *BITS)),
)


def require_memory(memory: str) -> None:
    if memory not in MEMORIES:
        *most, last = MEMORIES
        raise OptionError("memory", f"{', '.join(most)} or {last}", memory)


def keeps_all(memory: str | None) -> TypeGuard[str]:
    """Whether this is a memory in which all entries stay."""
    return memory not in (None, "drop")


def in_files(memory: str) -> bool:
    return store_kind(memory).in_files


def store_kind(memory: str) -> type[Store]:
    """The kind of store that keeps entries so; in memory, if `memory` is "drop"."""
    words = [word for word in memory.split(":")[1:] if word not in BITS]
    return STORES[":".join(words)]


def make_caches(model, memory: str) -> list:
    """A model's empty caches; unless `memory` is "drop", its full-attention layers keep all entries.

    Raises:
        SnapKVError: the model's entries can't be kept that way.
        UnsupportedModelError: its entries can't be compressed.
    """
    caches = make_prompt_cache(model)
    if memory == "drop":
        return caches
    layers = attention_layers(model, caches)
    quantization = memory_quantization(model, layers, memory)
    kind = store_kind(memory)
    for layer in layers:
        store = kind(quantization)
        layer.put(caches, RecordingKVCache(0, 0, KVCache.step, layer, store))
    return caches


def memory_quantization(model, layers: list[AttentionLayer], memory: str) -> Quantization | None:
    """How a memory stores entries, in groups of a size that divides the heads. Raises as `make_caches` does."""
    wider, _, bits = memory.rpartition(":")
    if bits not in BITS:
        return None
    require_quantised_attention(layers, "give {}", Option("memory", wider))
    groups = fitting_groups(head_sizes(model, layers), Option("memory", memory))
    return Quantization(int(bits[0]), 64 if 64 in groups else 32)


def recalling_caches(model, prompt_cache: list, memory: str) -> list:
    """Caches that keep all entries as `memory` says, beginning with a prompt cache's, which stays as it is.

    Raises: SnapKVError: some of its entries are gone, or the model's can't be kept that way.
    """
    if is_compressed(prompt_cache):
        raise SnapKVError(
            "{} needs a prompt cache with all entries, and this one is compressed",
            Option("memory", memory),
        )
    empty = make_caches(model, memory)
    layers = attention_layers(model, empty)
    caches = copies_but_entries(prompt_cache, layers)
    for layer in layers:
        layer.put(caches, moved_into(layer.cache_in(empty), layer.cache_in(prompt_cache)))
    return caches


def lasting_forms(model, caches: list, memory: str) -> list:
    """Caches that a caller goes on from: mlx-lm's own, which have no index, unless entries are in files or a book's."""
    stays = in_files(memory) or book_memory(caches) is not None
    return caches if stays else saved_forms(model, caches)


def saved_forms(model, caches: list) -> list:
    """Caches to be written to a file: of kinds that mlx-lm knows, but for a book's."""
    forms = list(caches)
    if any(cache.store is not None for cache in layer_caches(caches)):
        for layer in attention_layers(model, caches):
            layer.put(forms, layer.entries_in(caches).saved_form())
    return forms


def plain_forms(model, caches: list) -> list:
    """`saved_forms` that mlx-lm can batch: plain ones in memory."""
    forms = list(caches)
    for layer in attention_layers(model, caches):
        found = layer.entries_in(caches)
        if found.is_compressed or (found.store is None and found.quantization is None):
            continue
        plain: Any = KVCache()
        if found.offset:
            plain = full_cache(found.stored_entries().packed(None), found)
        layer.put(forms, plain)
    return forms


def moved_into(empty: Any, found: Any) -> Any:
    """A cache of `empty`'s kind with the entries of another, which is itself given back if it is of that kind already.

    Raises: SnapKVError: it does not hold all entries, or they are stored otherwise.
    """
    wanted, loaded = layer_cache(empty), layer_cache(found)
    if loaded.is_compressed or _alike(wanted.store, loaded.store):
        return found
    if wanted.in_files and loaded.in_files:
        stored = str(book_memory([found]))
        raise SnapKVError(
            "the entries of this prompt are stored otherwise: give {} or {}",
            Option("memory", stored),
            stored.replace(f":{found.store.name}", ""),
        )
    if not has_all_entries(found):
        raise SnapKVError(
            f"its {type(found).__name__} has no entries that a policy can choose among: load it without a policy"
        )
    if loaded.offset == 0:
        return empty
    if wanted.store is None:
        return full_cache(loaded.stored_entries().packed(None), loaded)
    empty.fill(loaded.stored_entries())  # as they are stored, which is not quantised twice
    take_notes(empty, loaded)
    return empty


def _alike(a: Store | None, b: Store | None) -> bool:
    """Whether entries of one need not be moved to the other: both are in files, or in memory as they are."""
    if a is None or b is None:
        return False
    return a.name == b.name and a.quantization == b.quantization


def book_memory(caches: list) -> str | None:
    """The memory in files that fits these caches; None if their entries are not in files."""
    for store in (cache.store for cache in books(caches)):
        how = store.quantization
        return f"recall:{store.name}" + (f":{how.bits}bit" if how else "")
    return None


def books(prompt_cache: list) -> list:
    """The caches whose entries are in files."""
    return [cache for cache in layer_caches(prompt_cache) if cache.in_files]
