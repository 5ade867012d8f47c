"""`verify="unsure"`: a token that the small cache leaves in doubt is decoded again, from entries that it voted for."""

import time

import mlx.core as mx

from ..caches.layers import layer_caches
from .gathering import Gathering
from .report import Verified

# Votes that an answer has to spare, and what each of its tokens adds to them.
VOTES_AT_FIRST = 8
VOTES_A_TOKEN = 1 / 8


class Unsure:
    """Answers a model's calls of one token from small caches, and asks all entries again when it is not sure.

    If the most likely token has less than `below`, the call is taken back, its queries vote over all entries, the small
    caches are gathered anew, and the same token is decoded again.

    Args:
        model: an mlx-lm model whose attention classes are patched.
        below: probability under which a token is in doubt, 0 to 1; with 1 every token is.
        verified: where the tokens are counted.
    """

    def __init__(self, model, gathering: Gathering, below: float, verified: Verified):
        self._model = model
        self._gathering = gathering
        self._below = below
        self._verified = verified

    def __call__(self, inputs: mx.array, cache: list) -> mx.array:
        started = time.perf_counter()
        logits = self._answered(inputs, cache)
        mx.eval(logits)
        self._verified.seconds += time.perf_counter() - started
        return logits

    def _answered(self, inputs: mx.array, cache: list) -> mx.array:
        if self._gathering.is_due(cache):
            self._gathering.gather(cache)
        caches = layer_caches(cache)
        for each in caches:
            each.mark()
        logits = self._model(inputs, cache=cache)
        self._verified.tokens += 1
        if self._may_vote() and not (top_probability(logits) >= self._below).item():
            for each in caches:
                each.rollback(1)
            self._gathering.gather(cache)
            logits = self._model(inputs, cache=cache)
        for each in caches:
            each.commit()
        return logits

    def _may_vote(self) -> bool:
        spare = VOTES_AT_FIRST + VOTES_A_TOKEN * self._verified.tokens - self._verified.votes
        return spare >= 1 or self._below >= 1


def top_probability(logits: mx.array) -> mx.array:
    """Probability of the most likely next token after `(1, 1, vocab_size)` logits."""
    logits = logits.astype(mx.float32)
    return mx.exp(logits.max() - mx.logsumexp(logits))
