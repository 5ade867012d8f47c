"""Conversations in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_lm.models.cache import KVCache

from . import models, saved
from .conversation import Conversation
from .errors import SnapKVError
from .recorder import RecordingKVCache
from .report import NO_POLICY


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
    caches = _replaced(conversation, RecordingKVCache, _plain)
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
    conversation.prompt_cache = found.prompt_cache
    if conversation.memory == "recall" and conversation.policy is not None:
        conversation.prompt_cache = _replaced(conversation, KVCache, _recording)
    return conversation


def _replaced(conversation: Conversation, kind: type, replacement) -> list:
    """The conversation's caches, those of a kind in the full-attention layers replaced."""
    caches = list(conversation.prompt_cache)
    if conversation.policy is None:  # then any model will do
        return caches
    for layer in models.attention_layers(conversation.model, conversation.prompt_cache):
        cache = layer.cache_in(conversation.prompt_cache)
        if isinstance(cache, kind):
            layer.put(caches, replacement(cache))
    return caches


def _plain(cache: RecordingKVCache) -> KVCache:
    return _with_rows_of(cache, KVCache())


def _recording(cache: KVCache) -> RecordingKVCache:
    return _with_rows_of(cache, RecordingKVCache(0, 0, KVCache.step))


def _with_rows_of(cache: KVCache, other):
    other.keys, other.values, other.offset = cache.keys, cache.values, cache.offset
    return other
