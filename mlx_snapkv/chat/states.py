"""Restore a conversation: to its state before the last turn, and from a file."""

import weakref
from pathlib import Path
from typing import Any

from .. import saved
from ..caches.layers import is_compressed, kv_bytes
from ..caches.matching import n_tokens
from ..compress.policy import Policy
from ..engine.report import NO_POLICY
from ..engine.restore import CacheCopy
from ..errors import Option, SnapKVError
from ..planning.config import CompressionConfig
from ..planning.options import OPTIONS
from ..planning.settings import Setting, resolve_setting, setting_named
from ..sparse.options import Sparse
from ..sparse.prompt_caches import book_store, make_caches, move_entries

# Attributes of a conversation that a saved file holds.
STATE_FIELDS = ("messages", "said", "attached", "pending_tokens", "system", "n_unknown")
# Attributes of a conversation that every turn replaces.
TURN_FIELDS = ("messages", "said", "read", "pending_tokens", "report")


class StateBefore:
    """The state of a conversation before a turn, to which it can be restored exactly until the next turn begins.

    Attributes:
        caches: a copy of the prompt cache.
    """

    def __init__(self, conversation: Any):
        """Copy the conversation's caches and the fields that a turn changes."""
        self.caches = CacheCopy(conversation.prompt_cache)
        # A proxy, since the conversation holds this object: a reference cycle would keep the caches' memory.
        self._conversation = weakref.proxy(conversation)
        self._fields = {name: getattr(conversation, name) for name in TURN_FIELDS}

    def restore(self) -> None:
        """Restore the conversation's caches and attributes."""
        self.caches.restore()
        vars(self._conversation).update(self._fields)

    @property
    def is_cheap(self) -> bool:
        """Return whether the copy takes at most the memory of the cache itself; False if nothing had been read."""
        cache_bytes = kv_bytes(self._conversation.prompt_cache)
        return bool(self._fields["read"]) and self.caches.kv_nbytes <= cache_bytes


def load(
    path: str | Path, model, policy: Policy | Setting | str | None, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load a saved conversation, or a saved text that questions will be asked about; see `Conversation.load`.

    Returns: The keywords to make the `Conversation` with, and the attributes to set afterwards.

    Raises: SnapKVError: the file can't be read, holds a prompt that is neither, or can't be continued with `policy`.
    """
    prompt = saved.load(path, model)
    # Files of mlx-lm have no tokens, and their notes have other meanings.
    is_from_mlx_lm = prompt.tokens is None
    notes = {} if is_from_mlx_lm else prompt.notes
    if not is_from_mlx_lm and "messages" not in notes and "text" not in notes:
        raise SnapKVError(
            f"{path} holds a prompt, but neither a conversation nor a text to ask about"
        )
    setting = _resumed_setting(path, prompt, policy)
    noted = notes.get("options", {})
    store = _resumed_store(path, prompt, setting, options.get("store"), noted.get("store"))
    # The noted options say how the entries in the file were read.
    request_options: dict[str, Any] = {name: options.get(name) for name in OPTIONS}
    request_options |= {name: value for name, value in noted.items() if value is not None}
    request_options["store"] = store
    config = CompressionConfig(setting, **request_options)
    caches = list(prompt.prompt_cache)
    try:
        if setting is not None:
            move_entries(model, caches, into=make_caches(model, config.store, config.store_dir))
    except SnapKVError as error:
        raise SnapKVError("{} can't be used: {}", path, error) from error
    # `mlx-snapkv cache-prompt` saves a text and its `system_prompt`.
    system = notes.get("system", notes.get("system_prompt"))
    state = {name: notes[name] for name in STATE_FIELDS if name in notes}
    state |= {"prompt_cache": caches, "read": prompt.tokens}
    if "text" in notes:
        state["attached"] = [notes["text"]]
    if is_from_mlx_lm:  # its tokens are unknown
        n = n_tokens(prompt.prompt_cache)
        state |= {"n_unknown": n, "read": [0] * n}
    return {"policy": setting, "sparse": None, "system": system, **config.keywords}, state


def _resumed_setting(
    path: str | Path, prompt: saved.SavedPrompt, policy: Policy | Setting | str | None
) -> Setting | None:
    """Return the setting to continue a file with: the file's own, or `policy` for a file without one.

    Raises: SnapKVError: the entries are in files, of which only sparse attention reads few.
    """
    if prompt.policy != NO_POLICY:
        policy = prompt.policy
    setting = setting_named(policy) if isinstance(policy, str) else resolve_setting(policy=policy)
    if book_store(prompt.prompt_cache) is not None and not isinstance(setting, Sparse):
        raise SnapKVError(
            "{} holds a book, of which all entries stay: give {} instead of a policy",
            path,
            Option("sparse"),
        )
    return setting


def _resumed_store(
    path: str | Path,
    prompt: saved.SavedPrompt,
    setting: Setting | None,
    store: str | None,
    noted_store: str | None,
) -> str | None:
    """Return the name of the store to continue a file with.

    Args:
        path: the file, for the error's sentence.
        prompt: the loaded file.
        setting: the setting to continue with.
        store: the store that the caller asks for; it takes precedence over the file's own.
        noted_store: the store in the file's notes.

    Raises: SnapKVError: the file's entries are compressed, and `setting` is None or needs all entries.
    """
    if prompt.policy != NO_POLICY:
        # The file's setting is continued, whatever the caller asks for, and only sparse attention has a store.
        store = store or noted_store if isinstance(setting, Sparse) else None
    store = store or book_store(prompt.prompt_cache)
    if is_compressed(prompt.prompt_cache):
        if setting is None:
            raise SnapKVError(f"{path} holds a compressed prompt, which needs a policy to continue")
        if store is not None or isinstance(setting, Sparse):
            raise SnapKVError(
                "{} holds a compressed prompt, whose evicted entries are gone: drop {}",
                path,
                Option("sparse") if store is None else Option("store", store),
            )
    return store
