"""Conversations in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_lm.models.cache import KVCache, QuantizedKVCache

from .. import saved
from ..caches.file_store import FileRows
from ..caches.layers import attention_layers, members
from ..caches.offloaded import RestingKVCache
from ..caches.recording import RecordingKVCache
from ..caches.stores import QuantizedRows
from ..engine.compress import is_compressed
from ..engine.report import NO_POLICY
from ..errors import SnapKVError
from ..policies import Policy, Stages, resolve_policy
from .memory import empty_caches, require_memory
from .state import ChatState, first_messages


def save(path: str | Path, model, state: ChatState) -> None:
    """Write a conversation with a model to a file.

    Raises:
        SnapKVError: the file can't be written, or nothing has been said yet.
    """
    if not state.read:
        raise SnapKVError("nothing has been said yet, so there is nothing to save")
    notes = {
        "messages": state.messages,
        "attached": state.attached,
        "pending_tokens": state.pending_tokens,
        "memory": state.memory,
        "system": state.system,
        "n_unknown": state.n_unknown,
    }
    saved.save(
        path, model, _saved_caches(model, state), state.read, state.policy or NO_POLICY, notes
    )


def load(
    path: str | Path, model, policy: Policy | Stages | str | None = None, memory: str = "drop"
) -> ChatState:
    """Read a conversation, or a text that waits for its first question.

    Args:
        policy, memory: for a full cache that was saved without a policy. A conversation that was saved with one
            goes on with its own.

    Raises:
        SnapKVError: the file is damaged, another model's, or can't go on with that policy.
    """
    found = saved.load(path, model)
    notes = {} if found.tokens is None else found.notes  # mlx-lm's are about other things
    if found.tokens is not None and not {"messages", "text"} & set(notes):
        raise SnapKVError(f"{path} holds a prompt, but no conversation and no text to ask about")
    if found.policy != NO_POLICY:
        policy, memory = found.policy, notes.get("memory", "drop")
    if is_compressed(found.prompt_cache) and (policy is None or memory != "drop"):
        need = (
            "a policy to go on with" if policy is None else "memory=drop, the other rows are gone"
        )
        raise SnapKVError(f"{path} holds a compressed prompt, which needs {need}")
    require_memory(memory)
    policy = resolve_policy(policy=policy)
    state = ChatState(_loaded_caches(model, policy, memory, found.prompt_cache), policy, memory)
    if found.tokens is None:
        state.n_unknown = max(getattr(c, "offset", 0) for c in members(found.prompt_cache))
        state.read = [0] * state.n_unknown
    else:
        _take_notes(state, notes)
        state.read = found.tokens
    return state


def _take_notes(state: ChatState, notes: dict[str, Any]) -> None:
    """What `save` has noted of a conversation, or `mlx-snapkv cache-prompt` of a text."""
    state.system = notes.get("system", notes.get("system_prompt"))
    state.messages = notes.get("messages", first_messages(state.system))
    state.attached = notes.get("attached", [notes["text"]] if "text" in notes else [])
    state.pending_tokens = notes.get("pending_tokens", notes.get("owed", []))  # its earlier name
    state.n_unknown = notes.get("n_unknown", 0)


def _saved_caches(model, state: ChatState) -> list:
    """The conversation's caches in kinds that mlx-lm knows, or that are saved as they are."""
    caches = list(state.prompt_cache)
    if state.policy is not None and state.memory != "drop":  # else any model will do
        for layer in attention_layers(model, caches):
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


def _loaded_caches(model, policy: Policy | Stages | None, memory: str, found: list) -> list:
    """Loaded caches, in the kinds that the conversation's policy and memory want."""
    caches = list(found)
    if policy is not None:
        empty = empty_caches(model, policy, memory)
        for layer in attention_layers(model, empty):
            layer.put(caches, _filled(layer.cache_in(empty), layer.cache_in(found)))
    return caches


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
