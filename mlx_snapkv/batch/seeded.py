"""Sampling with a seed of one's own, whatever else is sampled in the same steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx


class SeededSampler:
    """A sampler whose draws are those of mlx-lm's loop after `mx.random.seed(seed)`, also among others' in a batch.

    mlx's generator is one for the whole process. Before each draw it is set to where this request's own sequence is,
    which is computed apart: nothing waits for the model.

    Args:
        sampler: of log-probabilities; it draws from mlx's global generator.
        seed: 64 bits.
        draws: how often it does so a token.
    """

    def __init__(self, sampler: Callable[[mx.array], mx.array], seed: int, draws: int):
        self._sampler = sampler
        self._key = mx.random.key(seed)
        self._draws = draws

    def __call__(self, logprobs: mx.array) -> mx.array:
        state: Any = self._key.tolist()
        high, low = state
        mx.random.seed((high << 32) | low)
        for _ in range(self._draws):
            self._key = mx.random.split(self._key, stream=mx.cpu)[0]
        return self._sampler(logprobs)
