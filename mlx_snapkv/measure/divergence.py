"""How far predictions of known tokens are from the full cache's."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np

from ..caches.layers import attention_layers, held_tokens
from ..engine.generate import generate_step
from ..engine.loop_model import one_by_one
from ..engine.report import CompressionReport
from ..models import attention_classes
from ..models.patch import recording
from .reading import Reading

MIN_LOG_PROBABILITY = -1e4  # of a log-probability: a token that can't come counts for nothing


class Reference:
    """Tokens after a prompt, and the full cache's predictions of them.

    Args:
        n_fed: so many of the tokens are fed with the prompt; those after them are judged.

    Attributes:
        prompt: with those tokens.
    """

    def __init__(self, reading: Reading, tokens: Sequence[int], n_fed: int = 0):
        self._reading, self._n_fed = reading, n_fed
        self.prompt = [*reading.tokens, *tokens[:n_fed]]
        self._tokens = list(tokens[n_fed:])

    def __len__(self) -> int:
        return len(self._tokens)

    @cached_property
    def logprobs(self) -> mx.array:
        """The full cache's, `(len(self), vocab_size)`."""
        found = self.predictions(self._reading.full())
        if not self._n_fed:
            found = mx.concatenate([self._first, found])
        mx.eval(found)
        return found

    @property
    def _first(self) -> mx.array:
        return log_softmax(self._reading.following[None])

    def predictions(self, cache: list) -> mx.array:
        """Log-probabilities `(m, vocab_size)` for the last `m` tokens: all but those that a cache was fed before."""
        model = self._reading.model
        known = [*self.prompt, *self._tokens][held_tokens(model, cache) : -1]
        return log_softmax(judged(model, cache, known)[-len(self) :]) if known else self._first[:0]

    def generated(
        self,
        policy: Any,
        on_report: Callable[[CompressionReport], None] = lambda report: None,
        **options: Any,
    ) -> mx.array:
        """Log-probabilities `(m, vocab_size)` of the last `m` tokens, with a policy that reads the prompt itself.

        These are the tokens that are decoded after the compression; `options` are those of `generate_step`.
        """
        tokens, before = iter(self._tokens), len(self)
        found: list[mx.array] = []

        def compressed(report: CompressionReport) -> None:
            nonlocal before
            # The full cache gives the token that is about to come, and the next one: mlx-lm runs one step ahead.
            before = len(found) + 2
            on_report(report)

        steps = generate_step(
            mx.array(self.prompt),
            self._reading.model,
            policy=policy,
            max_tokens=len(self),
            sampler=lambda logprobs: mx.array([next(tokens, 0)]),
            on_report=compressed,
            **options,
        )
        for _, logprobs in steps:
            found.append(logprobs)
        after = found[before:]
        return log_softmax(mx.stack(after)) if after else self._first[:0]

    def n_agreed(self, cache: list) -> int:
        """The first so many tokens are what a cache predicts, or was fed; one pass feeds it all of them."""
        logprobs = self.predictions(cache)
        n_fed = len(self) - len(logprobs)
        if n_fed == len(self):
            return n_fed
        right = np.array(mx.argmax(logprobs, axis=-1)) == self._tokens[n_fed:]
        return n_fed + int(np.cumprod(right).sum())

    def figures(self, logprobs: mx.array) -> dict[str, Any]:
        """`kl` of the full cache from others' predictions of the last tokens, in nats a token, and the share of these
        tokens for which the `same` one is likeliest; None each if there are none.
        """
        if not len(logprobs):
            return {"kl": None, "same": None}
        full = self.logprobs[-len(logprobs) :]
        same = mx.argmax(logprobs, axis=-1) == mx.argmax(full, axis=-1)
        return {"kl": divergence(full, logprobs).mean(), "same": same.mean()}

    def loss(self, logprobs: mx.array) -> mx.array:
        """Negative log-probability of the tokens, all of which others predict: the mean, in nats."""
        return -mx.take_along_axis(logprobs, mx.array(self._tokens)[:, None], axis=-1).mean()


def judged(model: Any, prompt_cache: list, tokens: Sequence[int]) -> mx.array:
    """Logits `(n, vocab_size)` after each of `n` known tokens, as if they came one by one; the cache holds them then.

    That is one call of the model, or one between two evictions, and one for each token where tokens choose what they
    read.
    """
    layers = attention_layers(model, prompt_cache)
    caches = [layer.entries_in(prompt_cache) for layer in layers]
    at_once = 1 if any(cache.chooses for cache in caches) else len(tokens)
    pieces = [list(tokens[i : i + at_once]) for i in range(0, len(tokens), at_once)]
    going_on = one_by_one(model, prompt_cache)
    with recording(attention_classes(model)):
        each = (going_on(mx.array(piece)[None], cache=prompt_cache)[0] for piece in pieces)
        return mx.concatenate(list(each))


def log_softmax(logits: mx.array) -> mx.array:
    """Float32."""
    logits = logits.astype(mx.float32)
    return mx.maximum(logits - mx.logsumexp(logits, axis=-1, keepdims=True), MIN_LOG_PROBABILITY)


def divergence(logprobs: mx.array, others: mx.array) -> mx.array:
    """KL of predictions from others' `(n, vocab_size)`, in nats, float32 `(n,)`."""
    return (mx.exp(logprobs) * (logprobs - others)).sum(axis=-1)
