"""What the turns of a conversation can't do, and how the last one is undone."""

import inspect
from typing import Any

from ..caches.layers import kv_bytes
from ..engine.prefill import mlx_generate
from ..engine.retention import RetentionConfig
from ..engine.rewind import Rewind
from ..engine.serving import require_servable
from ..errors import SnapKVError, UnknownOptionError, suggestion
from ..policies import Policy, Stages

_REPLACED = ("messages", "said", "read", "pending_tokens", "report")  # by every turn


def require_usable(
    model: Any,
    policy: Policy | Stages | None,
    retention: RetentionConfig,
    generation: dict[str, Any],
) -> None:
    """Raises: SnapKVError: policy, memory and the options of answers conflict, or the model can't be used so."""
    if policy is None:
        retention.require(model, policy)
        return
    _, decode_policy = policy.stages
    if decode_policy.repeats is not None:
        raise SnapKVError(
            f"{decode_policy.name} reads a prompt again as a whole, and a conversation's turns are only parts of one: "
            "save the text by cache-prompt and ask by generate --prompt-cache-file, or take another policy"
        )
    require_servable(model, policy, retention, generation)


def require_known(generation: dict[str, Any]) -> None:
    """Raises: UnknownOptionError: mlx-lm knows no such option of an answer."""
    found = inspect.signature(mlx_generate.generate_step).parameters.values()
    own = ("prompt_cache", "input_embeddings")  # which the conversation gives
    known = {p.name for p in found if p.kind is p.KEYWORD_ONLY and p.name not in own}
    for name in generation:
        if name not in known:
            close = suggestion(name, known)
            raise UnknownOptionError(
                f"unknown option {name!r} of a conversation{close}; known: {', '.join(sorted(known))}"
            )


class Before:
    """Restores a conversation to the state it is in now, bit for bit; once, while its next turn is the last one."""

    def __init__(self, conversation: Any):
        self._rewind = Rewind(conversation.prompt_cache)
        self._fields = {name: getattr(conversation, name) for name in _REPLACED}

    def restore(self, conversation: Any) -> None:
        self._rewind.restore()
        vars(conversation).update(self._fields)

    def release(self) -> None:
        """Continue from what was fed since; `restore` still works when the turn has ended."""
        self._rewind.release()

    @property
    def kv_nbytes(self) -> int:
        """Bytes of keys and values that are kept for this alone."""
        return self._rewind.kv_nbytes

    def is_cheap(self, conversation: Any) -> bool:
        """Whether anything had been read, and this keeps no more than the conversation itself."""
        return bool(self._fields["read"]) and self.kv_nbytes <= kv_bytes(conversation.prompt_cache)
