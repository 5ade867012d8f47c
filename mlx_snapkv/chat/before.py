"""How a conversation was before a turn."""

from __future__ import annotations

from typing import Any

from ..caches.layers import kv_bytes
from ..engine.rewind import Rewind

_REPLACED = ("messages", "said", "read", "pending_tokens", "report")  # by every turn


class Before:
    """Brings a conversation back to where it is now, bit for bit: once, while its next turn is the last one."""

    def __init__(self, conversation: Any):
        self._rewind = Rewind(conversation.prompt_cache)
        self._fields = {name: getattr(conversation, name) for name in _REPLACED}

    def restore(self, conversation: Any) -> None:
        self._rewind.restore()
        vars(conversation).update(self._fields)

    def release(self) -> None:
        """Go on from what was fed since; `restore` still works when the turn has ended."""
        self._rewind.release()

    @property
    def kv_nbytes(self) -> int:
        """Bytes of keys and values that are kept for this alone."""
        return self._rewind.kv_nbytes

    def is_cheap(self, conversation: Any) -> bool:
        """Whether it keeps no more than the conversation itself does, and anything had been read."""
        return bool(self._fields["read"]) and self.kv_nbytes <= kv_bytes(conversation.prompt_cache)
