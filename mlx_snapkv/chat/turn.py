"""One turn: its tokens read on the conversation's cache, which is compressed if the policy says so, and the answer."""

import functools
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse

from ..caches.layers import is_compressed
from ..engine.decision import gate
from ..engine.making import make_request
from ..engine.prefill import mlx_generate
from ..engine.recalling import Recall
from ..engine.report import NO_POLICY, CompressionReport
from ..engine.serving import MAX_TOKENS, ReportCallback, drive, without_compression
from ..entries.quantization import taken_from
from ..policies import Policy, Stages


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
