"""How far predictions of known tokens are from the full cache's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..engine.generate import generate_step
from ..engine.request import held_tokens
from .reading import judged

LEAST = -1e4  # of a log-probability: a token that can't come counts for nothing


class Reference:
    """Tokens after a prompt, and the full cache's predictions of them.

    Args:
        cache: a full one that has been fed the prompt's first tokens, all of them at most.
        following: log-probabilities `(vocab_size,)` after the prompt, if it has been fed all.
    """

    def __init__(
        self,
        model: Any,
        prompt: Sequence[int],
        tokens: Sequence[int],
        cache: list,
        following: mx.array | None = None,
    ):
        self._model, self._prompt, self._tokens = model, list(prompt), list(tokens)
        found = self.predictions(cache)
        if following is not None and len(found) < len(tokens):
            first = log_softmax(following[None])
            found = mx.concatenate([first, found]) if len(tokens) > 1 else first
        self.logprobs = found
        self._best = mx.argmax(found, axis=-1)
        mx.eval(found, self._best)

    def __len__(self) -> int:
        return len(self._tokens)

    def predictions(self, cache: list) -> mx.array:
        """Log-probabilities `(m, vocab_size)` for the last `m` tokens: all but those that a cache was fed before."""
        known = [*self._prompt, *self._tokens][held_tokens(self._model, cache) : -1]
        if not known:
            return mx.zeros((0, 1))
        return log_softmax(judged(self._model, cache, known)[-len(self) :])

    def generated(self, policy: Any, **options: Any) -> mx.array:
        """Log-probabilities for all tokens by a policy that reads the prompt itself; `options` of `generate_step`."""
        tokens = iter(self._tokens)
        steps = generate_step(
            mx.array(self._prompt),
            self._model,
            policy=policy,
            max_tokens=len(self),
            sampler=lambda logprobs: mx.array([next(tokens, 0)]),
            **options,
        )
        return log_softmax(mx.stack([logprobs for _, logprobs in steps]))

    def divergence(self, logprobs: mx.array) -> Any:
        """The mean KL of the full cache from others' predictions of the last tokens, in nats a token; else it is 0."""
        if not len(logprobs):
            return 0.0
        return divergence(self.logprobs[-len(logprobs) :], logprobs).sum() / len(self)

    def same(self, logprobs: mx.array) -> Any:
        """The share of the tokens for which the same one is likeliest; all that others don't predict are."""
        if not len(logprobs):
            return 1.0
        others = mx.argmax(logprobs, axis=-1) != self._best[-len(logprobs) :]
        return 1 - others.sum() / len(self)

    def loss(self, logprobs: mx.array) -> mx.array:
        """Mean negative log-probability of the tokens, in nats."""
        return -mx.take_along_axis(logprobs, mx.array(self._tokens)[:, None], axis=-1).mean()


def log_softmax(logits: mx.array) -> mx.array:
    """Float32."""
    logits = logits.astype(mx.float32)
    return mx.maximum(logits - mx.logsumexp(logits, axis=-1, keepdims=True), LEAST)


def divergence(logprobs: mx.array, others: mx.array) -> mx.array:
    """KL of predictions from others' `(n, vocab_size)`, in nats, float32 `(n,)`."""
    return (mx.exp(logprobs) * (logprobs - others)).sum(axis=-1)
