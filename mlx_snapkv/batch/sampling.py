"""Samplers and logits processors of one request among others of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx


class Guard:
    """A sampler or logits processor whose failure ends its own request only.

    Args:
        function: called with arguments the last of which are `(1, vocab_size)` logits.
        fallback: what it returns for those logits once `function` has failed.

    Attributes:
        error: what `function` raised.
    """

    def __init__(self, function: Callable[..., mx.array], fallback: Callable[[mx.array], mx.array]):
        self._function = function
        self._fallback = fallback
        self.error: Exception | None = None

    def __call__(self, *args: Any) -> mx.array:
        instead = self._fallback(args[-1])
        if self.error is not None:
            return instead
        try:
            found = self._function(*args)
            if found.shape != instead.shape:
                raise ValueError(f"it gave an array of shape {found.shape}, not {instead.shape}")
        except Exception as error:
            self.error = error
            return instead
        return found


def guarded_sampler(sampler: Callable[[mx.array], mx.array]) -> Guard:
    return Guard(sampler, lambda logprobs: mx.argmax(logprobs, axis=-1))


def guarded_processor(processor: Callable[[mx.array, mx.array], mx.array]) -> Guard:
    return Guard(processor, lambda logits: logits)
