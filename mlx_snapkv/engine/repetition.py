"""Reading a prompt a second time behind itself, so that the queries of the repeated tokens vote for its entries."""

import time
from typing import Any

import mlx.core as mx

from ..caches.layers import AttentionLayer
from ..entries.attention import most_attention
from ..planning.prompt_plan import ProgressCallback
from ..policies import Policy
from ..policies.base import LEAD
from .rewind import Rewind

AT_ONCE = 512  # tokens read again before they vote: until then the queries of all layers are held


def most_repeated(policy: Policy, n_prompt: int) -> int:
    """Tokens of a prompt that are fed again at once, at most."""
    assert policy.repeats is not None
    return min(policy.repeats, n_prompt) + LEAD


class Repetition:
    """A prompt's tokens, fed again chunk by chunk when all have been read, and rolled back each time.

    The policy's `repeats`, `lead_in` and `n_sink` say what is fed and what may be looked at; `seconds` is what it took.
    """

    def __init__(self, model: Any, layers: list[AttentionLayer], policy: Policy, n_prompt: int):
        assert policy.repeats is not None
        self._model, self._layers, self._policy = model, layers, policy
        self._n_prompt, self._chunk = n_prompt, policy.repeats
        self._inputs: list[mx.array] = []
        self._callback: ProgressCallback = lambda done, total: None
        self.seconds = 0.0

    def progress(self, callback: ProgressCallback) -> ProgressCallback:
        """For mlx-lm's loop: the tokens that are read again count as much as those that are read."""
        self._callback, total = callback, 2 * self._n_prompt
        return lambda done, n_prompt: callback(total if done == n_prompt else done, total)

    def read(self, inputs: mx.array, cache: list) -> mx.array:
        """The model's call for tokens `(1, L)` of the prompt; behind its last one, all are read again."""
        logits = self._model(inputs, cache=cache)
        n_left = self._n_prompt - sum(x.shape[1] for x in self._inputs)
        if n_left == 0:
            return logits
        self._inputs.append(inputs)
        if n_left > inputs.shape[1]:
            return logits
        mx.eval(logits, [c.state for c in cache])
        started = time.perf_counter()
        tokens = mx.concatenate(self._inputs, axis=1)[0]
        starts = range(0, self._n_prompt, self._chunk)
        chunks = [self._read_again(tokens, start, cache) for start in starts]
        for layer, *votes in zip(self._layers, *chunks):
            layer.cache_in(cache).start_recording(self._n_prompt, self._n_prompt)
            layer.cache_in(cache).repeated = mx.concatenate(votes, axis=-1)
        self.seconds = time.perf_counter() - started
        return logits

    def _read_again(self, tokens: mx.array, start: int, cache: list) -> list[mx.array]:
        """By layer, the votes for the chunk from `start` on, `(B, n_kv_heads, n)`."""
        chunk = tokens[start : start + self._chunk]
        lead = self._policy.lead_in(tokens, start)
        again = mx.concatenate([lead, chunk])[None]
        asked = range(start, start + chunk.size)
        step = min(AT_ONCE, max(x.shape[1] for x in self._inputs))
        before = Rewind(cache)
        most: list[mx.array] = []
        for first in range(0, again.shape[1], step):
            found = self._votes(again[:, first : first + step], cache, asked)
            most = [mx.maximum(*pair) for pair in zip(most, found)] if most else found
            mx.eval(most)
            done = start + max(0, min(first + step, again.shape[1]) - lead.size)
            self._callback(self._n_prompt + min(done, self._n_prompt - 1), 2 * self._n_prompt)
        before.restore()
        return most

    def _votes(self, inputs: mx.array, cache: list, asked: range) -> list[mx.array]:
        for layer in self._layers:
            layer.cache_in(cache).start_recording(self._n_prompt)
        self._model(inputs, cache=cache)
        mx.eval([c.state for c in cache])
        n_sink = min(self._policy.n_sink, asked.start)
        found = []
        for layer in self._layers:
            entries = layer.entries_in(cache).held(inputs.shape[1])
            most = most_attention(entries.blocks(), entries.voters, n_sink, asked, self._n_prompt)
            mx.eval(most)
            found.append(most)
        return found
