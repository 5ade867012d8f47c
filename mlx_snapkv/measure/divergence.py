"""Compare a compressed cache's predictions of known tokens with the full cache's."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import mlx.core as mx

from ..caches.layers import attention_layers, n_tokens
from ..engine.generate import generate_step
from ..engine.loop_model import split_at_evictions
from ..engine.report import CompressionReport
from ..models import attention_classes
from ..models.patch import recording
from .reading import Reading

MIN_LOG_PROBABILITY = -1e4  # replaces -inf, which could make divergences NaN


class Reference:
    """Known tokens after a prompt, and the full cache's predictions for them.

    Args:
        reading: the prompt, read into full caches.
        tokens: the tokens after the prompt.
        n_fed: number of `tokens` to feed along with the prompt. The other tokens are judged: a cache's predictions for
            them are compared with the full cache's.

    Attributes:
        prompt: prompt tokens, followed by the first `n_fed` of `tokens`.
    """

    def __init__(self, reading: Reading, tokens: Sequence[int], n_fed: int = 0):
        """Copy the tokens. Predictions are computed on demand."""
        self._reading = reading
        self._n_fed = n_fed
        self.prompt = [*reading.tokens, *tokens[:n_fed]]
        self._tokens = list(tokens[n_fed:])

    def __len__(self) -> int:
        """Return the number of judged tokens."""
        return len(self._tokens)

    @cached_property
    def logprobs(self) -> mx.array:
        """Return the full cache's log-probabilities for the judged tokens, `(len(self), vocab_size)`."""
        logprobs = self.predictions(self._reading.full_cache())
        if not self._n_fed:
            # The prediction after the prompt's last token is missing, because `full_cache` has already read that token.
            logprobs = mx.concatenate([self._first_logprobs, logprobs])
        mx.eval(logprobs)
        return logprobs

    @property
    def _first_logprobs(self) -> mx.array:
        """Return the full cache's log-probabilities for the token after the prompt, `(1, vocab_size)`."""
        return log_softmax(self._reading.next_logprobs[None])

    def predictions(self, cache: list) -> mx.array:
        """Feed a cache the tokens that it has not read, and return its predictions.

        The result is log-probabilities `(m, vocab_size)` for the last `m` judged tokens. If the cache has already read
        the prompt and `k` judged tokens, the first `k + 1` judged tokens have no prediction.
        """
        model = self._reading.model
        # Don't feed the last token, because no token after it is predicted.
        unread = [*self.prompt, *self._tokens][n_tokens(cache) : -1]
        if not unread:
            return self._first_logprobs[:0]
        return log_softmax(logits_after(model, cache, unread)[-len(self) :])

    def generate(
        self,
        policy: Any,
        on_report: Callable[[CompressionReport], None] = lambda report: None,
        **options: Any,
    ) -> mx.array:
        """Feed the known tokens through `generate_step` and return its predictions after compression.

        The result is log-probabilities `(m, vocab_size)` for the last `m` judged tokens.

        Args:
            policy: setting for `generate_step`.
            on_report: called with the compression report.
            **options: other keyword arguments for `generate_step`.
        """
        known_tokens = iter(self._tokens)
        # Number of tokens predicted before compression: all, if nothing is compressed.
        n_before = len(self)
        predictions: list[mx.array] = []

        def note_compression(report: CompressionReport) -> None:
            nonlocal n_before
            # mlx-lm runs one step ahead, so the next two predictions to arrive were made before compression.
            n_before = len(predictions) + 2
            on_report(report)

        steps = generate_step(
            mx.array(self.prompt),
            self._reading.model,
            policy=policy,
            max_tokens=len(self),
            # Feed the known tokens, regardless of the predictions.
            sampler=lambda logprobs: mx.array([next(known_tokens, 0)]),
            on_report=note_compression,
            **options,
        )
        for _, logprobs in steps:
            predictions.append(logprobs)
        after_compression = predictions[n_before:]
        if not after_compression:
            return self._first_logprobs[:0]
        return log_softmax(mx.stack(after_compression))

    def kl_and_same(self, logprobs: mx.array) -> dict[str, Any]:
        """Compare log-probabilities for the last `m` judged tokens with the full cache's.

        Args:
            logprobs: `(m, vocab_size)`.

        Returns:
            `kl`: mean KL divergence from the full cache, in nats per token. `same`: share of tokens for which both
            caches predict the same token. Both values are scalar arrays, or None if `m` is 0.
        """
        n_predicted = len(logprobs)
        if n_predicted == 0:
            return {"kl": None, "same": None}
        full_logprobs = self.logprobs[-n_predicted:]
        is_same = mx.argmax(logprobs, axis=-1) == mx.argmax(full_logprobs, axis=-1)
        return {"kl": divergence(full_logprobs, logprobs).mean(), "same": is_same.mean()}

    def loss(self, logprobs: mx.array) -> mx.array:
        """Return the mean negative log-probability of all judged tokens, in nats."""
        return -mx.take_along_axis(logprobs, mx.array(self._tokens)[:, None], axis=-1).mean()


def logits_after(model: Any, prompt_cache: list, tokens: Sequence[int]) -> mx.array:
    """Feed `n` known tokens to a cache, and return the logits after each of them, `(n, vocab_size)`.

    The logits are the same as if the tokens were fed one by one. If each token chooses the entries that it reads, the
    model is called once per token. Otherwise, the tokens are split into several calls only where a cache evicts.
    """
    layers = attention_layers(model, prompt_cache)
    tokens_choose = any(layer.layer_cache_in(prompt_cache).chooses for layer in layers)
    n_per_call = 1 if tokens_choose else len(tokens)
    chunks = [list(tokens[i : i + n_per_call]) for i in range(0, len(tokens), n_per_call)]
    loop_model = split_at_evictions(model, prompt_cache)
    with recording(attention_classes(model)):
        # The batch has one sequence.
        logits = [loop_model(mx.array(chunk)[None], cache=prompt_cache)[0] for chunk in chunks]
        return mx.concatenate(logits)


def log_softmax(logits: mx.array) -> mx.array:
    """Return float32 log-probabilities for logits `(..., vocab_size)`, clipped below at `MIN_LOG_PROBABILITY`."""
    logits = logits.astype(mx.float32)
    return mx.maximum(logits - mx.logsumexp(logits, axis=-1, keepdims=True), MIN_LOG_PROBABILITY)


def divergence(logprobs: mx.array, others: mx.array) -> mx.array:
    """Return KL(logprobs || others) for each of `n` predictions, in nats.

    Both arguments have shape `(n, vocab_size)`. The result is float32 `(n,)`.
    """
    return (mx.exp(logprobs) * (logprobs - others)).sum(axis=-1)
