"""Conversations in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_lm.models.cache import KVCache, QuantizedKVCache

from . import models, saved
from .conversation import Conversation
from .errors import SnapKVError
from .file_rows import FileRows
from .models import AttentionLayer
from .recorder import RecordingKVCache
from .report import NO_POLICY
from .resting_cache import RestingKVCache
from .row_store import QuantizedRows


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
    }
    policy = conversation.policy or NO_POLICY
    caches = _saved_caches(conversation)
    saved.save(path, conversation.model, caches, conversation.read, policy, notes)


def load(path: str | Path, model, tokenizer, **generation: Any) -> Conversation:
    """`Conversation.load`."""
    found = saved.load(path, model)
    notes = found.notes
    if found.tokens is None or not {"messages", "text"} & set(notes):
        raise SnapKVError(f"{path} holds a prompt, but no conversation and no text to ask about")
    system = notes.get("system", notes.get("system_prompt"))
    conversation = Conversation(
        model,
        tokenizer,
        policy=None if found.policy == NO_POLICY else found.policy,
        memory=notes.get("memory", "drop"),
        system=system,
        **generation,
    )
    conversation.messages = notes.get("messages", conversation.messages)
    conversation.attached = notes.get("attached", [notes["text"]] if "text" in notes else [])
    conversation.read, conversation.owed = found.tokens, notes.get("owed", [])
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
    """Go on with loaded caches."""
    caches = list(found)
    for layer in _recalling_layers(conversation):
        cache = layer.cache_in(conversation.prompt_cache)
        _fill(cache, layer.cache_in(found))
        layer.put(caches, cache)
    conversation.prompt_cache = caches


def _fill(cache: RecordingKVCache | RestingKVCache, found) -> None:
    """Put the rows of a loaded cache into an empty one of a conversation."""
    quantised = isinstance(found, QuantizedKVCache)
    if isinstance(cache, RecordingKVCache) and isinstance(found, KVCache):
        cache.keys, cache.values, cache.offset = found.keys, found.values, found.offset
    elif isinstance(cache, RestingKVCache) and quantised and isinstance(cache.store, QuantizedRows):
        cache.store = QuantizedRows.of(found)
    elif isinstance(cache, RestingKVCache) and isinstance(found, KVCache):
        cache.fresh = found
        if isinstance(cache.store, FileRows):
            cache.rest()
    else:
        raise SnapKVError(
            f"it holds a {type(found).__name__}, with which its memory can't go on: save the conversation again"
        )


def _recalling_layers(conversation: Conversation) -> list[AttentionLayer]:
    """The layers whose caches keep all rows: without a policy there are none, and any model will do."""
    if conversation.policy is None or conversation.memory == "drop":
        return []
    return models.attention_layers(conversation.model, conversation.prompt_cache)
