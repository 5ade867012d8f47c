"""Conversations in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_lm.models.cache import KVCache, QuantizedKVCache

from .. import saved
from ..caches.file_store import FileRows
from ..caches.layers import AttentionLayer, attention_layers, members
from ..caches.offloaded import RestingKVCache
from ..caches.recording import RecordingKVCache
from ..caches.stores import QuantizedRows
from ..engine.compress import is_compressed
from ..engine.report import NO_POLICY
from ..errors import SnapKVError
from ..policies import Policy, Stages
from .conversation import Conversation


def save(conversation: Conversation, path: str | Path) -> None:
    """`Conversation.save`."""
    if not conversation.read:
        raise SnapKVError("nothing has been said yet, so there is nothing to save")
    notes = {
        "messages": conversation.messages,
        "attached": conversation.attached,
        "owed": conversation.owed,
        "memory": conversation.memory,
        "system": conversation.system,
        "n_unknown": conversation.n_unknown,
    }
    policy = conversation.policy or NO_POLICY
    caches = _saved_caches(conversation)
    saved.save(path, conversation.model, caches, conversation.read, policy, notes)


def load(
    path: str | Path,
    model,
    tokenizer,
    policy: Policy | Stages | str | None,
    memory: str,
    **generation: Any,
) -> Conversation:
    """`Conversation.load`."""
    found = saved.load(path, model)
    notes = found.notes
    if found.tokens is not None and not {"messages", "text"} & set(notes):
        raise SnapKVError(f"{path} holds a prompt, but no conversation and no text to ask about")
    if found.policy != NO_POLICY:
        policy, memory = found.policy, notes.get("memory", "drop")
    system = notes.get("system", notes.get("system_prompt")) if found.tokens is not None else None
    if is_compressed(found.prompt_cache) and (policy is None or memory != "drop"):
        need = (
            "a policy to go on with" if policy is None else "memory=drop, the other rows are gone"
        )
        raise SnapKVError(f"{path} holds a compressed prompt, which needs {need}")
    conversation = Conversation(
        model, tokenizer, policy=policy, memory=memory, system=system, **generation
    )
    if found.tokens is None:
        held = max(getattr(c, "offset", 0) for c in members(found.prompt_cache))
        conversation.n_unknown, conversation.read = held, [0] * held
    else:
        conversation.messages = notes.get("messages", conversation.messages)
        conversation.attached = notes.get("attached", [notes["text"]] if "text" in notes else [])
        conversation.read, conversation.owed = found.tokens, notes.get("owed", [])
        conversation.n_unknown = notes.get("n_unknown", 0)
    _take(conversation, found.prompt_cache)
    return conversation


def _saved_caches(conversation: Conversation) -> list:
    """The conversation's caches in kinds that mlx-lm knows, or that are saved as they are."""
    caches = list(conversation.prompt_cache)
    for layer in _recalling_layers(conversation):
        layer.put(caches, _saved_form(layer.cache_in(caches)))
    return caches


def _saved_form(cache: RecordingKVCache | RestingKVCache) -> KVCache | QuantizedKVCache:
    """A cache with the same rows, quantised ones as they are."""
    saved_as = KVCache()
    if isinstance(cache, RecordingKVCache):
        saved_as.keys, saved_as.values, saved_as.offset = cache.keys, cache.values, cache.offset
        return saved_as
    if cache.store.n_rows:
        cache.rest()
        if isinstance(cache.store, QuantizedRows):
            return cache.store.as_cache()
    saved_as.keys, saved_as.values = cache.keys_and_values()
    saved_as.offset = cache.offset
    return saved_as


def _take(conversation: Conversation, found: list) -> None:
    """Go on with loaded caches, in the kinds that the conversation's policy and memory want."""
    caches = list(found)
    if conversation.policy is not None:
        for layer in attention_layers(conversation.model, conversation.prompt_cache):
            empty = layer.cache_in(conversation.prompt_cache)
            layer.put(caches, _filled(empty, layer.cache_in(found)))
    conversation.prompt_cache = caches


def _filled(empty: KVCache | RestingKVCache, found):
    """A cache of `empty`'s kind with the rows of a loaded one, which is itself given back if it is compressed."""
    if is_compressed([found]):
        return found
    if isinstance(found, QuantizedKVCache):
        if isinstance(empty, RestingKVCache) and isinstance(empty.store, QuantizedRows):
            empty.store = QuantizedRows.of(found)
            return empty
        found = _dequantised(found)
    if not isinstance(found, KVCache):
        raise SnapKVError(
            f"its {type(found).__name__} has no rows that a policy can choose among: load it without a policy"
        )
    if isinstance(empty, RestingKVCache):
        empty.fresh = found
        if isinstance(empty.store, FileRows):
            empty.rest()
    else:
        empty.keys, empty.values, empty.offset = found.keys, found.values, found.offset
    return empty


def _dequantised(cache: QuantizedKVCache) -> KVCache:
    plain: Any = KVCache()
    plain.keys, plain.values = QuantizedRows.of(cache).rows()
    plain.offset = cache.offset
    return plain


def _recalling_layers(conversation: Conversation) -> list[AttentionLayer]:
    """The layers whose caches keep all rows: without a policy there are none, and any model will do."""
    if conversation.policy is None or conversation.memory == "drop":
        return []
    return attention_layers(conversation.model, conversation.prompt_cache)
