"""The memories of a conversation: what is kept of its entries between turns, and where."""

from typing import Any

from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..entries.quantization import Quantization, fitting_groups
from ..errors import SnapKVError
from .adapter import has_all_entries, layer_cache, plain_cache
from .file_store import FileStore
from .layers import (
    AttentionLayer,
    attention_layers,
    copies_but_entries,
    is_compressed,
    members,
)
from .offloaded import OffloadedKVCache
from .quantizable import head_sizes
from .recording import FullRecorder, RecordingKVCache
from .stores import QuantizedStore

MEMORIES = ("drop", "recall", "recall:8bit", "recall:4bit", "recall:file")
_BITS = {"recall:8bit": 8, "recall:4bit": 4}


def require_memory(memory: str) -> None:
    """Raises: SnapKVError: it is none of `MEMORIES`."""
    if memory not in MEMORIES:
        *most, last = MEMORIES
        raise SnapKVError(f"memory must be {', '.join(most)} or {last}, got {memory!r}")


def make_caches(model, memory: str) -> list:
    """A model's caches, empty; unless `memory` is "drop", those of its full-attention layers keep all entries.

    Raises:
        SnapKVError: the model's entries can't be kept that way.
        UnsupportedModelError: its entries can't be compressed.
    """
    caches = make_prompt_cache(model)
    if memory == "drop":
        return caches
    layers = attention_layers(model, caches)
    quantization = _fitting(model, layers, memory) if memory in _BITS else None
    for layer in layers:
        layer.put(caches, _recalling_cache(memory, quantization))
    return caches


def recalling_caches(model, prompt_cache: list, memory: str) -> list:
    """Caches that keep all entries as `memory` says, those of a prompt cache among them, which stays as it is.

    Raises:
        SnapKVError: it does not hold all entries of what it has read, or the model's can't be kept that way.
    """
    if is_compressed(prompt_cache):
        raise SnapKVError(
            f"memory={memory} needs a prompt cache with all entries, and this one is compressed"
        )
    empty = make_caches(model, memory)
    layers = attention_layers(model, empty)
    caches = copies_but_entries(prompt_cache, layers)
    for layer in layers:
        found = layer.cache_in(prompt_cache)
        if not isinstance(found, OffloadedKVCache):
            layer.put(caches, filled(layer.cache_in(empty), found))
    return caches


def lasting_forms(model, caches: list, memory: str) -> list:
    """Caches of a memory for whoever goes on from them: mlx-lm's own, unless the entries are in files."""
    return caches if memory == "recall:file" else saved_forms(model, caches)


def saved_forms(model, caches: list) -> list:
    """Caches that keep all entries, in kinds that mlx-lm knows; any others as they are."""
    forms = list(caches)
    if any(isinstance(cache, FullRecorder) for cache in members(caches)):
        for layer in attention_layers(model, caches):
            layer.put(forms, layer.cache_in(caches).saved_form())
    return forms


def filled(empty: Any, found: Any) -> Any:
    """A cache of `empty`'s kind with the entries of a loaded one, which is itself given back if it is compressed.

    Raises:
        SnapKVError: it does not hold all entries.
    """
    if layer_cache(found).is_compressed:
        return found
    if not has_all_entries(found):
        raise SnapKVError(
            f"its {type(found).__name__} has no entries that a policy can choose among: load it without a policy"
        )
    if layer_cache(found).offset == 0:
        return empty
    entries = layer_cache(found).held()
    if isinstance(empty, FullRecorder):
        empty.fill(entries)
        return empty
    return plain_cache(entries.keys, entries.values)


def _recalling_cache(memory: str, quantization: Quantization | None) -> FullRecorder:
    if quantization is not None:
        return OffloadedKVCache(QuantizedStore(quantization))
    if memory == "recall:file":
        return OffloadedKVCache(FileStore())
    return RecordingKVCache(0, 0, KVCache.step)


def _fitting(model, layers: list[AttentionLayer], memory: str) -> Quantization:
    """The memory's bits, in groups of a size that divides the model's heads."""
    groups = fitting_groups(head_sizes(model, layers), f"memory={memory}")
    return Quantization(_BITS[memory], 64 if 64 in groups else 32)
