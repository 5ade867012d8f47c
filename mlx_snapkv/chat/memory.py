"""What a conversation keeps of its rows between turns, and where."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..caches.file_store import FileRows
from ..caches.layers import AttentionLayer, attention_layers, members
from ..caches.offloaded import RestingKVCache
from ..caches.recording import RecordingKVCache
from ..caches.stores import QuantizedRows
from ..entries.quantization import Quantization, fitting_groups
from ..errors import SnapKVError
from ..policies import Policy, Stages

MEMORIES = ("drop", "recall", "recall:8bit", "recall:4bit", "recall:file")
_BITS = {"recall:8bit": 8, "recall:4bit": 4}


def require_memory(memory: str) -> None:
    """Raises: SnapKVError: it is none of `MEMORIES`."""
    if memory not in MEMORIES:
        *most, last = MEMORIES
        raise SnapKVError(f"memory must be {', '.join(most)} or {last}, got {memory!r}")


def recalling_caches(model, memory: str) -> list:
    """A model's caches, empty, those of its full-attention layers of a kind that keeps all rows.

    Raises:
        SnapKVError: the model's rows can't be kept that way.
        UnsupportedModelError: its rows can't be compressed.
    """
    caches = make_prompt_cache(model)
    layers = attention_layers(model, caches)
    quantization = _fitting(model, layers, memory) if memory in _BITS else None
    for layer in layers:
        layer.put(caches, _empty_cache(memory, quantization))
    return caches


def empty_caches(model, policy: Policy | Stages | None, memory: str) -> list:
    """A model's caches, of the kinds that a conversation with this policy and memory begins with.

    Raises:
        SnapKVError: the model's rows can't be kept that way.
    """
    if policy is None or memory == "drop":
        return make_prompt_cache(model)
    return recalling_caches(model, memory)


def file_bytes(prompt_cache: list) -> int:
    """Bytes of the rows that rest in files."""
    resting = (c for c in members(prompt_cache) if isinstance(c, RestingKVCache))
    return sum(cache.store.file_bytes for cache in resting)


def _empty_cache(
    memory: str, quantization: Quantization | None
) -> RecordingKVCache | RestingKVCache:
    if quantization is not None:
        return RestingKVCache(QuantizedRows(quantization))
    if memory == "recall:file":
        return RestingKVCache(FileRows())
    return RecordingKVCache(0, 0, KVCache.step)


def _fitting(model, layers: list[AttentionLayer], memory: str) -> Quantization:
    """The memory's bits, in groups of a size that divides the model's heads."""
    caches = make_prompt_cache(model)
    model(mx.zeros((1, 1), mx.int32), cache=caches)  # for the shapes: nothing is computed
    rows = [rows for layer in layers for rows in layer.cache_in(caches).keys_and_values()]
    groups = fitting_groups((x.shape[3] for x in rows), f"memory={memory}")
    return Quantization(_BITS[memory], 64 if 64 in groups else 32)
