"""What the turns of a conversation can't do, and how the last one is undone."""

import inspect
from typing import Any

from ..caches.layers import kv_bytes
from ..engine.prefill import mlx_generate
from ..engine.rewind import Rewind
from ..errors import UnknownOptionError, suggestion

_REPLACED = ("messages", "said", "read", "pending_tokens", "report")  # by every turn


class Before(Rewind):
    """Restores a conversation to the state it is in now, bit for bit; once, while its next turn is the last one."""

    def __init__(self, conversation: Any):
        super().__init__(conversation.prompt_cache)
        self._conversation = conversation
        self._fields = {name: getattr(conversation, name) for name in _REPLACED}

    def restore(self) -> None:
        super().restore()
        vars(self._conversation).update(self._fields)

    @property
    def is_cheap(self) -> bool:
        """Whether anything had been read, and this keeps no more than the conversation itself."""
        held = kv_bytes(self._conversation.prompt_cache)
        return bool(self._fields["read"]) and self.kv_nbytes <= held


def require_known(generation: dict[str, Any]) -> None:
    """Raises: UnknownOptionError: mlx-lm knows no such option of an answer."""
    found = inspect.signature(mlx_generate.generate_step).parameters.values()
    own = ("prompt_cache", "input_embeddings")  # which the conversation gives
    known = {p.name for p in found if p.kind is p.KEYWORD_ONLY and p.name not in own}
    for name in generation.keys() - known:
        close, names = suggestion(name, known), ", ".join(sorted(known))
        raise UnknownOptionError(
            f"unknown option {name!r} of a conversation{close}; known: {names}"
        )
