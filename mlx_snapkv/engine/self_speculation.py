"""Exact answers, self-speculative: the model drafts tokens on small caches, and verifies them in one pass over all
entries (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, arXiv:2211.17192, with the
model as its own draft). mlx-lm's loop asks for one token at a time, samples and processes logits as ever, and gets
those of the full caches: already computed if it asks for a token that was drafted.
"""

import sys
import time

import mlx.core as mx

from ..caches.layers import layer_caches
from ..several.shard import shard_of
from .report import Verified

FIRST_DRAFTS, MOST_DRAFTS = 4, 16  # a round: two more after one that was all right, else one less
PATIENCE = 100  # tokens after which drafting must have gained something


class SelfSpeculation:
    """Makes calls of one token of a model, whose attention classes are patched, ahead of time where drafts were right.

    It drafts on its `small` caches, checks on its `full` ones, and counts both in `verified`.
    """

    def __init__(self, model, full: list, small: list, verified: Verified):
        self._model, self._full, self._small, self._verified = model, full, small, verified
        self._n_drafts, self._n_next = 0, FIRST_DRAFTS  # of the last round, and of the next
        self._ahead: list[tuple[int, mx.array]] = []  # drafts, and the logits after each
        self._unread: list[int] = []  # tokens that the small caches have not read
        # Rounds to come without drafts: to be measured, or since drafts gain nothing.
        self._n_plain = 2
        self._gained = 0, 0.0  # tokens and seconds when drafts were last found to gain something

    def __call__(self, inputs: mx.array, cache: list) -> mx.array:
        token: int = inputs.item()  # type: ignore[assignment]
        self._verified.tokens += 1
        if self._ahead and token == self._ahead[0][0]:
            self._verified.accepted += 1
            return self._ahead.pop(0)[1]
        started = time.perf_counter()
        if self._n_drafts:
            self._n_next += -1 if self._ahead else 2
            self._n_next = min(max(1, self._n_next), MOST_DRAFTS)
        self.close()
        # By the clock, which every rank has its own of.
        n_drafts = shard_of(self._model).ranks.first(0 if self._n_plain else self._n_next)
        logits = self._round(token, n_drafts)
        self._count(time.perf_counter() - started)
        return logits

    def close(self) -> None:
        """Roll back the drafts that were not used."""
        n_right = self._n_drafts - len(self._ahead)
        for cache in layer_caches(self._full):
            cache.rollback(len(self._ahead))
        # The small caches have not read the last draft.
        for cache in layer_caches(self._small):
            cache.rollback(max(0, self._n_drafts - 1 - n_right))
        if self._ahead:  # nor was that one right
            self._unread = []
        self._ahead, self._n_drafts = [], 0

    def _round(self, token: int, n_drafts: int) -> mx.array:
        """Logits `(1, 1, vocab_size)` after a token, and drafts ahead of it."""
        if n_drafts == 0:
            self._unread.append(token)
            return self._verify(mx.array([[token]]))
        tokens = [mx.array([[token]])]
        unread = mx.array([[*self._unread, token]])
        for _ in range(n_drafts):
            logits = self._model(unread, cache=self._small)
            unread = mx.argmax(logits[:, -1:], axis=-1)
            tokens.append(unread)
        drafted = mx.concatenate(tokens, axis=1)
        mx.eval(drafted)
        logits = self._verify(drafted)
        drafts: list[int] = drafted[0, 1:].tolist()  # type: ignore[assignment]
        self._ahead = [(draft, logits[:, i : i + 1]) for i, draft in enumerate(drafts, start=1)]
        self._verified.drafted += n_drafts
        self._n_drafts, self._unread = n_drafts, drafts[-1:]
        return logits[:, :1]

    def _verify(self, tokens: mx.array) -> mx.array:
        logits = self._model(tokens, cache=self._full)
        mx.eval(logits)
        return logits

    def _count(self, seconds: float) -> None:
        """Count a round's seconds, and stop drafting if the last `PATIENCE` tokens gained nothing."""
        verified = self._verified
        verified.seconds += seconds
        n, took = verified.tokens - self._gained[0], verified.seconds - self._gained[1]
        if self._n_plain:
            self._n_plain -= 1
            verified.plain_seconds = min(verified.plain_seconds or seconds, seconds)
        elif n < PATIENCE:
            return
        elif took >= n * verified.plain_seconds:
            self._n_plain = sys.maxsize
        self._gained = verified.tokens, verified.seconds
