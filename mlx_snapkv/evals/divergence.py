"""How far predictions are from the full cache's."""

from __future__ import annotations

import mlx.core as mx

LEAST = -1e4  # of a log-probability: a token that can't come counts for nothing


class Reference:
    """What the full cache says to known tokens.

    Args:
        logprobs: float32 `(n, vocab_size)`, after each of them.
    """

    def __init__(self, logprobs: mx.array):
        self.logprobs = logprobs
        self._probabilities = mx.exp(logprobs)
        self._best = mx.argmax(logprobs, axis=-1)
        mx.eval(self.logprobs, self._probabilities, self._best)

    def __len__(self) -> int:
        return self._best.size

    def divergence(self, logprobs: mx.array) -> mx.array:
        """KL of the full cache from others for the last `m` tokens, `(m, vocab_size)`: in nats, float32 `(m,)`."""
        first = len(self) - len(logprobs)
        apart = self.logprobs[first:] - logprobs
        return (self._probabilities[first:] * apart).sum(axis=-1)

    def differs(self, logprobs: mx.array) -> mx.array:
        """For which of these tokens another one is likeliest, bool `(m,)`."""
        return mx.argmax(logprobs, axis=-1) != self._best[len(self) - len(logprobs) :]


def log_softmax(logits: mx.array) -> mx.array:
    """Float32."""
    logits = logits.astype(mx.float32)
    return mx.maximum(logits - mx.logsumexp(logits, axis=-1, keepdims=True), LEAST)


def loss(logprobs: mx.array, tokens: list[int]) -> mx.array:
    """Mean negative log-probability, in nats, of the tokens that came after each of `(n, vocab_size)`."""
    return -mx.take_along_axis(logprobs, mx.array(tokens)[:, None], axis=-1).mean()
