"""Conversations in files."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .. import saved
from ..caches.layers import attention_layers, is_compressed
from ..caches.matching import n_tokens
from ..caches.memories import book_memory, filled, make_caches, require_memory, saved_forms
from ..engine.report import NO_POLICY
from ..errors import SnapKVError
from ..policies import Policy, Stages, resolve_policy


@dataclass
class ChatState:
    """What a conversation continues from, besides the model and the options of its answers.

    The attributes are the conversation's own. `prompt_cache` is of the kinds that `policy` and `memory` ask for.
    """

    prompt_cache: list
    policy: Policy | Stages | None = None
    memory: str = "drop"
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    said: list[list[str]] = field(default_factory=list)
    attached: list[str] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    pending_tokens: list[int] = field(default_factory=list)
    n_unknown: int = 0


STATE = frozenset(f.name for f in fields(ChatState))


def first_messages(system: str | None) -> list[dict[str, str]]:
    return [] if system is None else [{"role": "system", "content": system}]


def save(path: str | Path, model, state: ChatState) -> None:
    """Write a conversation with a model to a file; see `Conversation.save`."""
    if not state.read:
        raise SnapKVError("nothing has been said yet, so there is nothing to save")
    noted = ("messages", "said", "attached", "pending_tokens", "memory", "system", "n_unknown")
    notes = {name: getattr(state, name) for name in noted}
    caches = saved_forms(model, state.prompt_cache)
    saved.save(path, model, caches, state.read, state.policy or NO_POLICY, notes)


def load(
    path: str | Path, model, policy: Policy | Stages | str | None = None, memory: str = "drop"
) -> ChatState:
    """Read a conversation, or a text that waits for its first question; see `Conversation.load`."""
    found = saved.load(path, model)
    notes = {} if found.tokens is None else found.notes  # mlx-lm's are about other things
    if found.tokens is not None and not {"messages", "text"} & set(notes):
        raise SnapKVError(f"{path} holds a prompt, but no conversation and no text to ask about")
    policy, memory = _ways(path, found, notes, policy, memory)
    require_memory(memory)
    policy = resolve_policy(policy=policy)
    try:
        caches = _loaded_caches(model, policy, memory, found.prompt_cache)
    except SnapKVError as error:
        raise SnapKVError(f"{path} can't be used: {error}") from error
    state = ChatState(caches, policy, memory)
    if found.tokens is None:
        state.n_unknown = n_tokens(found.prompt_cache)
        state.read = [0] * state.n_unknown
    else:
        _take_notes(state, notes)
        state.read = found.tokens
    return state


def _ways(path, found: saved.SavedPrompt, notes: dict[str, Any], policy, memory: str) -> tuple:
    """The policy and memory to continue with, given what was asked for. Raises: SnapKVError: the caches can't."""
    book = book_memory(found.prompt_cache)
    if found.policy != NO_POLICY:
        policy = found.policy
        if book is None or memory == "drop":
            memory = notes.get("memory", "drop")
    if book is not None:
        memory = book if memory == "drop" else memory
    if policy is None and (book is not None or is_compressed(found.prompt_cache)):
        raise SnapKVError(
            f"{path} holds a {'book' if book else 'compressed prompt'}, which needs a policy to go on with"
        )
    if memory != "drop" and book is None and is_compressed(found.prompt_cache):
        raise SnapKVError(
            f"{path} holds a compressed prompt, which needs memory=drop, the other entries are gone"
        )
    return policy, memory


def _take_notes(state: ChatState, notes: dict[str, Any]) -> None:
    """From `save`, or from `mlx-snapkv cache-prompt`, which saves a text."""
    state.system = notes.get("system", notes.get("system_prompt"))
    state.messages = notes.get("messages", first_messages(state.system))
    state.said = notes.get("said", [])
    state.attached = notes.get("attached", [notes["text"]] if "text" in notes else [])
    state.pending_tokens = notes.get("pending_tokens", [])
    state.n_unknown = notes.get("n_unknown", 0)


def _loaded_caches(model, policy: Policy | Stages | None, memory: str, found: list) -> list:
    """Loaded caches, in the kinds that the conversation's policy and memory want."""
    caches = list(found)
    if policy is not None:
        empty = make_caches(model, memory, policy)
        for layer in attention_layers(model, empty):
            layer.put(caches, filled(layer.cache_in(empty), layer.cache_in(found)))
    return caches
