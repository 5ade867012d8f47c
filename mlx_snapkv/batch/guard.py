"""Samplers and logits processors of a request, whose failure ends that request only."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx


class Guard:
    """A sampler or logits processor as mlx-lm calls it; after it has failed, what stands in for it.

    Args:
        function: called with arguments the last of which are `(1, vocab_size)` logits.
        otherwise: of those logits, what is given instead.

    Attributes:
        error: what it raised.
    """

    def __init__(
        self, function: Callable[..., mx.array], otherwise: Callable[[mx.array], mx.array]
    ):
        self._function = function
        self._otherwise = otherwise
        self.error: Exception | None = None

    def __call__(self, *args: Any) -> mx.array:
        instead = self._otherwise(args[-1])
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
