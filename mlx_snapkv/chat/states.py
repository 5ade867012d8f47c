"""Load a saved conversation, or restore a conversation to its state before the last turn."""

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import saved
from ..caches.layers import is_compressed, kv_bytes, n_tokens
from ..compress.policy import Policy
from ..engine.report import NO_POLICY
from ..engine.restore import CacheCopy
from ..errors import Option, SnapKVError
from ..planning.settings import Setting, resolve_setting, setting_named
from ..sparse.options import Sparse
from ..sparse.prompt_caches import caches_in_files, make_caches, move_entries

# Conversation attributes that are saved to files.
STATE_FIELDS = (
    "messages",
    "user_inputs",
    "attached",
    "pending_tokens",
    "system",
    "n_unknown",
)
# Conversation attributes that a turn replaces. `attached` is left out, because `Conversation.undo` restores it.
TURN_FIELDS = ("messages", "user_inputs", "read", "pending_tokens", "report")


class StateBeforeTurn:
    """A snapshot of a conversation before a turn, kept at most until the first token of the next turn's answer.

    Attributes:
        caches: a copy of the prompt cache.
    """

    def __init__(self, conversation: Any):
        """Copy the caches, and the attributes that a turn changes."""
        self.caches = CacheCopy(conversation.prompt_cache)
        # The conversation refers to this object. A strong reference would create a cycle that keeps the caches alive.
        self._conversation = weakref.proxy(conversation)
        self._fields = {name: getattr(conversation, name) for name in TURN_FIELDS}

    def restore(self) -> None:
        """Restore the conversation's caches and attributes."""
        self.caches.restore()
        vars(self._conversation).update(self._fields)

    @property
    def is_worth_keeping(self) -> bool:
        """Return whether the copy takes no more memory than the conversation's cache.

        Return False if nothing had been read before the turn.
        """
        had_entries = bool(self._fields["read"])
        return had_entries and self.caches.kv_nbytes <= kv_bytes(self._conversation.prompt_cache)


def load_saved(
    path: str | Path, model, policy: Policy | Setting | str | None
) -> tuple[Setting | None, dict[str, Any]]:
    """Load a saved conversation or text; see `Conversation.load`.

    Returns: The setting, and the conversation's attributes, including `system`.

    Raises: SnapKVError: the file can't be read, contains neither a conversation nor a text, or can't be used with
        `policy`.
    """
    store_dir = policy.store_dir if isinstance(policy, Sparse) else None
    prompt = saved.load(path, model, store_dir=store_dir)
    notes = _notes_of(prompt, path)
    setting = _resumed_setting(path, prompt, policy)
    caches = list(prompt.prompt_cache)
    try:
        if setting is not None:
            sparse = setting if isinstance(setting, Sparse) else None
            move_entries(model, caches, into=make_caches(model, sparse))
    except SnapKVError as error:
        raise SnapKVError("{} can't be used: {}", path, error) from error
    attributes = {name: notes[name] for name in STATE_FIELDS if name in notes}
    # `mlx-snapkv cache-prompt` saves the system prompt as `system_prompt`.
    attributes.setdefault("system", notes.get("system_prompt"))
    if "text" in notes:
        attributes["attached"] = [notes["text"]]
    if prompt.is_from_mlx_lm:
        n_unknown = n_tokens(prompt.prompt_cache)
        attributes |= {"n_unknown": n_unknown, "read": [0] * n_unknown}
    else:
        attributes["read"] = prompt.tokens
    attributes["prompt_cache"] = caches
    return setting, attributes


def _notes_of(prompt: saved.SavedPrompt, path: str | Path) -> dict[str, Any]:
    """Return the notes of a saved conversation or text, or `{}` for an mlx-lm file.

    Raises: SnapKVError: the file contains neither a conversation nor a text.
    """
    if prompt.is_from_mlx_lm:
        return {}
    if "messages" not in prompt.notes and "text" not in prompt.notes:
        raise SnapKVError(
            f"{path} holds a prompt, but neither a conversation nor a text to ask about"
        )
    return prompt.notes


def _resumed_setting(
    path: str | Path, prompt: saved.SavedPrompt, policy: Policy | Setting | str | None
) -> Setting | None:
    """Choose the setting for continuing from a file: the file's own, or `policy` if the file has none.

    If both are sparse attention, the file's setting is used with `policy.store_dir`, and with `policy.store` unless
    that is "memory", the default.

    Raises: SnapKVError: the setting can't be used with the file's entries.
    """
    policy_or_name = policy if prompt.policy == NO_POLICY else prompt.policy
    if isinstance(policy_or_name, str):
        setting = setting_named(policy_or_name)
    else:
        setting = resolve_setting(policy=policy_or_name)
    _require_usable(setting, path, prompt.prompt_cache)
    if not isinstance(setting, Sparse):
        return setting
    if isinstance(policy, Sparse):
        store = setting.store if policy.store == "memory" else policy.store
        setting = replace(setting, store=store, store_dir=policy.store_dir)
    file_caches = caches_in_files(prompt.prompt_cache)
    if file_caches and setting.store == "memory":
        setting = replace(setting, store=file_caches[0].store.name)
    return setting


def _require_usable(setting: Setting | None, path: str | Path, prompt_cache: list) -> None:
    """Check that a conversation with this setting can continue from a saved prompt cache.

    Raises: SnapKVError: the prompt is a book (see `saved.book`) and the setting is not sparse attention, or the prompt
        cache is compressed and the setting is not a policy.
    """
    is_book = bool(caches_in_files(prompt_cache))
    if is_book and not isinstance(setting, Sparse):
        raise SnapKVError(
            "{} holds a book, of which all entries stay: give {} instead of a policy",
            path,
            Option("sparse"),
        )
    if not is_compressed(prompt_cache):
        return
    if setting is None:
        raise SnapKVError(f"{path} holds a compressed prompt, which needs a policy to continue")
    if isinstance(setting, Sparse):
        raise SnapKVError(
            "{} holds a compressed prompt, whose evicted entries are gone: drop {}",
            path,
            Option("sparse"),
        )
