"""One turn: its tokens read on the conversation's cache, which is compressed if the policy says so; and its undoing."""

import functools
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse

from ..caches.layers import kv_bytes
from ..engine.prefill import mlx_generate
from ..engine.retention import RetentionConfig
from ..engine.rewind import Rewind
from ..engine.serving import MAX_TOKENS, ReportCallback, served, without_compression
from ..policies import Policy, Stages

_REPLACED = ("messages", "said", "read", "pending_tokens", "report")  # by every turn


def turn(
    model,
    tokenizer,
    tokens: mx.array,
    prompt_cache: list,
    policy: Policy | Stages | None,
    retention: RetentionConfig,
    on_report: ReportCallback,
    options: dict[str, Any],
) -> Iterator[GenerationResponse]:
    """mlx-lm's responses to a turn's tokens `(n,)`; `options` are of its `stream_generate`."""
    start = functools.partial(mlx_generate.stream_generate, tokenizer=tokenizer, prompt=tokens)
    n_answer = options.get("max_tokens", MAX_TOKENS)
    wanted = tokens.size, n_answer, policy, retention, on_report
    options = options | {"prompt_cache": prompt_cache}
    return served(start, model, *wanted, options, after=without_compression, turns=True)


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
