"""Tokens with their probabilities, as clients may ask for them."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..batch.openai_body import Body
from .channel import Chosen


def n_likely(body: Body) -> int | None:
    """How many likely tokens are to be told with each; None if none are, nor their own probability."""
    return getattr(body, "n_top_logprobs", None)


def chosen(response: Any, n: int, tokenizer) -> Chosen:
    logprobs = response.logprobs
    likely: list[int] = []
    if n:
        best = mx.argpartition(-logprobs, kth=n - 1)[:n]
        likely = best[mx.argsort(-logprobs[best])].tolist()  # type: ignore[assignment]
    token, *texts = [tokenizer.decode([i]) for i in (response.token, *likely)]
    top = zip(texts, (logprobs[i].item() for i in likely))
    return Chosen(token, logprobs[response.token].item(), tuple(top))
