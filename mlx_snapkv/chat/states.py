"""What a conversation is at some time: in a file, and before its last turn."""

import weakref
from pathlib import Path
from typing import Any

from .. import saved
from ..caches.layers import attention_layers, is_compressed, kv_bytes
from ..caches.matching import n_tokens
from ..compress.policy import Policy
from ..engine.report import NO_POLICY
from ..engine.restore import CacheCopy
from ..errors import Option, SnapKVError
from ..planning.config import CompressionConfig
from ..planning.options import OPTIONS
from ..planning.settings import Setting, resolve_setting, setting_named
from ..sparse.options import Sparse
from ..sparse.prompt_caches import book_store, make_caches, moved_into

STATE_FIELDS = ("messages", "said", "attached", "pending_tokens", "system", "n_unknown")
REPLACED = ("messages", "said", "read", "pending_tokens", "report")  # by every turn


class Before:
    """Restores a conversation to the state it is in now, bit for bit, while its next turn is the last one.

    Attributes:
        caches: restores its caches alone.
    """

    def __init__(self, conversation: Any):
        self.caches = CacheCopy(conversation.prompt_cache)
        # Which holds this, and is to go with its caches as soon as nobody needs it.
        self._conversation = weakref.proxy(conversation)
        self._fields = {name: getattr(conversation, name) for name in REPLACED}

    def restore(self) -> None:
        self.caches.restore()
        vars(self._conversation).update(self._fields)

    @property
    def is_cheap(self) -> bool:
        """Whether anything had been read, and this keeps no more than the conversation itself."""
        held = kv_bytes(self._conversation.prompt_cache)
        return bool(self._fields["read"]) and self.caches.kv_nbytes <= held


def load(
    path: str | Path, model, policy: Policy | Setting | str | None, options: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Of a saved conversation, or a text that waits for its first question: what a `Conversation` is made with, and
    attributes that it then gets; see `Conversation.load`."""
    prompt = saved.load(path, model)
    notes = {} if prompt.tokens is None else prompt.notes  # mlx-lm's are about other things
    if prompt.tokens is not None and not {"messages", "text"} & set(notes):
        raise SnapKVError(
            f"{path} holds a prompt, but neither a conversation nor a text to ask about"
        )
    method, own = _resumed(path, prompt, notes, policy, options)
    config = CompressionConfig(method, **own)
    caches = list(prompt.prompt_cache)
    try:
        if method is not None:
            empty = make_caches(model, config.store, config.store_dir)
            for layer in attention_layers(model, empty):
                layer.put(
                    caches, moved_into(layer.cache_in(empty), layer.cache_in(prompt.prompt_cache))
                )
    except SnapKVError as error:
        raise SnapKVError("{} can't be used: {}", path, error) from error
    # `mlx-snapkv cache-prompt` saves a text, and mlx-lm not even its tokens.
    system = notes.get("system", notes.get("system_prompt"))
    state = {name: notes[name] for name in STATE_FIELDS if name in notes}
    state |= {"prompt_cache": caches, "read": prompt.tokens}
    if "text" in notes:
        state["attached"] = [notes["text"]]
    if prompt.tokens is None:
        n = n_tokens(prompt.prompt_cache)
        state |= {"n_unknown": n, "read": [0] * n}
    return {"policy": method, "sparse": None, "system": system, **config.keywords}, state


def _resumed(
    path, prompt: saved.SavedPrompt, notes: dict[str, Any], policy, options: dict[str, Any]
) -> tuple:
    """Return the policy and `RequestOptions` to continue with, given what was asked for.

    Raises: SnapKVError: the caches can't be continued so.
    """
    book = book_store(prompt.prompt_cache)
    given, noted = {name: options.get(name) for name in OPTIONS}, notes.get("options", {})
    store, is_own = given["store"], prompt.policy != NO_POLICY
    policy = prompt.policy if is_own else policy
    method = setting_named(policy) if isinstance(policy, str) else resolve_setting(policy=policy)
    if is_own:
        store = store or noted.get("store") if isinstance(method, Sparse) else None
    if book is not None:
        if not isinstance(method, Sparse):
            raise SnapKVError(
                "{} holds a book, of which all entries stay: give {} instead of a policy",
                path,
                Option("sparse"),
            )
        store = store or book
    if is_compressed(prompt.prompt_cache):
        if method is None:
            raise SnapKVError(f"{path} holds a compressed prompt, which needs a policy to continue")
        if store is not None or isinstance(method, Sparse):
            raise SnapKVError(
                "{} holds a compressed prompt, whose evicted entries are gone: drop {}",
                path,
                Option("sparse") if store is None else Option("store", store),
            )
    # What was read under an option goes on under it.
    kept = {name: value for name, value in noted.items() if value is not None}
    return method, given | kept | {"store": store}
