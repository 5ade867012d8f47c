"""Conversations in files."""

from pathlib import Path
from typing import Any

from .. import saved
from ..caches.layers import attention_layers, is_compressed
from ..caches.matching import n_tokens
from ..caches.memories import book_memory, filled, make_caches, require_memory, saved_forms
from ..engine.report import NO_POLICY
from ..errors import SnapKVError
from ..policies import Policy, Stages, resolve_policy

NOTED = ("messages", "said", "attached", "pending_tokens", "memory", "system", "n_unknown")


def first_messages(system: str | None) -> list[dict[str, str]]:
    return [] if system is None else [{"role": "system", "content": system}]


def save(path: str | Path, conversation: Any) -> None:
    """Write a conversation to a file; see `Conversation.save`."""
    if not conversation.read:
        raise SnapKVError("nothing has been said yet, so there is nothing to save")
    notes = {name: getattr(conversation, name) for name in NOTED}
    model, policy = conversation.model, conversation.policy or NO_POLICY
    caches = saved_forms(model, conversation.prompt_cache)
    saved.save(path, model, caches, conversation.read, policy, notes)


def load(
    path: str | Path, model, policy: Policy | Stages | str | None = None, memory: str = "drop"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a conversation, or a text that waits for its first question; see `Conversation.load`.

    Returns:
        What a `Conversation` is made with, and attributes that it then gets.
    """
    found = saved.load(path, model)
    notes = {} if found.tokens is None else found.notes  # mlx-lm's are about other things
    if found.tokens is not None and not {"messages", "text"} & set(notes):
        raise SnapKVError(f"{path} holds a prompt, but no conversation and no text to ask about")
    policy, memory = _ways(path, found, notes, policy, memory)
    require_memory(memory)
    policy = resolve_policy(policy=policy)
    caches = list(found.prompt_cache)
    try:
        if policy is not None:
            empty = make_caches(model, memory, policy)
            for layer in attention_layers(model, empty):
                layer.put(caches, filled(layer.cache_in(empty), layer.cache_in(found.prompt_cache)))
    except SnapKVError as error:
        raise SnapKVError(f"{path} can't be used: {error}") from error
    # `mlx-snapkv cache-prompt` saves a text, and mlx-lm not even its tokens.
    system = notes.get("system", notes.get("system_prompt"))
    state = {name: notes[name] for name in NOTED if name in notes} | {"prompt_cache": caches}
    if "text" in notes:
        state["attached"] = [notes["text"]]
    state["read"] = found.tokens
    if found.tokens is None:
        state["n_unknown"] = n_tokens(found.prompt_cache)
        state["read"] = [0] * state["n_unknown"]
    ways = {"policy": policy, "memory": memory, "system": system}
    return ways, state | ways


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
