"""One turn: its tokens read on the conversation's cache, which is compressed if the policy says so; and its undoing."""

import functools
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse

from ..caches.layers import is_compressed, kv_bytes
from ..engine.decision import gate
from ..engine.making import make_request
from ..engine.prefill import mlx_generate
from ..engine.recalling import Recall
from ..engine.report import NO_POLICY, CompressionReport
from ..engine.rewind import Rewind
from ..engine.serving import MAX_TOKENS, ReportCallback, drive, without_compression
from ..entries.quantization import taken_from
from ..policies import Policy, Stages

_REPLACED = ("messages", "said", "read", "pending_tokens", "report")  # by every turn


def turn(
    model,
    tokenizer,
    tokens: mx.array,
    prompt_cache: list,
    n_read: int,
    policy: Policy | Stages | None,
    recall: Recall,
    on_report: ReportCallback,
    options: dict[str, Any],
) -> Iterator[GenerationResponse]:
    """mlx-lm's responses to a turn.

    Args:
        tokens: the turn's, `(n,)`.
        n_read: tokens that the cache has read before.
        options: of mlx-lm's `stream_generate`.
    """
    start = functools.partial(mlx_generate.stream_generate, tokenizer=tokenizer, prompt=tokens)
    n_prompt = n_read + tokens.size
    quantization = None
    reason: str | None = "no policy was given"
    if policy is not None:
        quantization, options = taken_from(options)
        goes_on = is_compressed(prompt_cache)
        n_answer = options.get("max_tokens", MAX_TOKENS)
        reason = None if goes_on else gate(policy, n_prompt, None, n_answer)
    if policy is None or reason is not None:
        on_report(CompressionReport(str(policy or NO_POLICY), n_prompt, reason))
        return start(model, **options, prompt_cache=prompt_cache)
    request = make_request(model, policy, tokens.size, prompt_cache, quantization, recall)
    return drive(start, request, on_report, options, without_compression, keep=True)


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
