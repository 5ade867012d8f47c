"""The memories of a conversation: what is kept of its entries between turns, and where."""

from typing import Any

from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from ..entries.quantization import Quantization, fitting_groups
from ..errors import Option, OptionError, SnapKVError
from .adapter import full_cache, has_all_entries, layer_cache
from .book import BookKVCache
from .contract import LosslessCache
from .file_store import FileStore
from .layers import (
    AttentionLayer,
    attention_layers,
    copies_but_entries,
    head_sizes,
    is_compressed,
    members,
    require_quantised_attention,
)
from .recording import RecordingKVCache
from .stores import MemoryStore, Store

MEMORIES = (
    "drop", "recall", "recall:8bit", "recall:4bit", "recall:file", "recall:file:8bit", "recall:file:4bit",
)  # fmt: skip


def require_memory(memory: str) -> None:
    if memory not in MEMORIES:
        *most, last = MEMORIES
        raise OptionError("memory", f"{', '.join(most)} or {last}", memory)


def in_files(memory: str) -> bool:
    return "file" in memory.split(":")


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
    for layer in layers:
        if in_files(memory):
            empty: Any = BookKVCache(0, 0, KVCache.step, layer, FileStore(quantization))
        else:
            empty = RecordingKVCache(0, 0, KVCache.step, layer, MemoryStore(quantization))
        layer.put(caches, empty)
    return caches


def memory_quantization(model, layers: list[AttentionLayer], memory: str) -> Quantization | None:
    """How a memory stores entries, in groups of a size that divides the heads. Raises as `make_caches` does."""
    wider, _, bits = memory.rpartition(":")
    if not bits.endswith("bit"):
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
        layer.put(caches, filled(layer.cache_in(empty), layer.cache_in(prompt_cache)))
    return caches


def lasting_forms(model, caches: list, memory: str) -> list:
    """Caches that a caller goes on from: mlx-lm's own, which have no index, unless entries are in files or a book's."""
    stays = in_files(memory) or book_memory(caches) is not None
    return caches if stays else saved_forms(model, caches)


def saved_forms(model, caches: list) -> list:
    """Caches to be written to a file: of kinds that mlx-lm knows, but for a book's."""
    forms = list(caches)
    if any(isinstance(cache, LosslessCache) for cache in members(caches)):
        for layer in attention_layers(model, caches):
            layer.put(forms, layer.cache_in(caches).saved_form())
    return forms


def plain_forms(model, caches: list) -> list:
    """`saved_forms` that mlx-lm can batch: plain ones in memory."""
    forms = saved_forms(model, caches)
    for layer in attention_layers(model, forms):
        found = layer.cache_in(forms)
        if isinstance(found, BookKVCache):
            found = RecordingKVCache.saved_form(found) if found.offset else KVCache()
            layer.put(forms, found)
        if isinstance(found, QuantizedKVCache):
            layer.put(forms, full_cache(layer_cache(found).held().packed(None)))
    return forms


def filled(empty: Any, found: Any) -> Any:
    """A cache of `empty`'s kind with the entries of another, which is itself given back if it is of that kind already.

    Raises: SnapKVError: it does not hold all entries, or they are stored otherwise.
    """
    loaded = layer_cache(found)
    stores = [x.store for x in (empty, found) if isinstance(x, RecordingKVCache)]
    if loaded.is_compressed or (len(stores) == 2 and _alike(*stores)):
        return found
    if books([found]) and books([empty]):
        stored = str(book_memory([found]))
        raise SnapKVError(
            "the entries of this prompt are stored otherwise: give {} or {}",
            Option("memory", stored),
            stored.replace(":file", ""),
        )
    if not has_all_entries(found):
        raise SnapKVError(
            f"its {type(found).__name__} has no entries that a policy can choose among: load it without a policy"
        )
    if loaded.offset == 0:
        return empty
    if isinstance(empty, LosslessCache):
        if isinstance(found, RecordingKVCache):  # as they are stored, which is not quantised twice
            found.offload()
            empty.fill(found.store.held())
        else:
            empty.fill(loaded.held())
        return empty
    return full_cache(loaded.held().packed(None))


def _alike(a: Store, b: Store) -> bool:
    """Whether entries of one need not be moved to the other: both are in files, or in memory as they are."""
    return type(a) is type(b) and a.quantization == b.quantization


def book_memory(caches: list) -> str | None:
    """The memory in files that fits these caches; None if their entries are not in files."""
    found = {cache.store.quantization for cache in books(caches)}
    return next((f"recall:file:{how.bits}bit" if how else "recall:file" for how in found), None)


def books(prompt_cache: list) -> list[BookKVCache]:
    """The caches whose entries are in files."""
    return [cache for cache in members(prompt_cache) if isinstance(cache, BookKVCache)]
