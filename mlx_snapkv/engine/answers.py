"""Exact answers, self-speculative: the model drafts tokens on small caches, and verifies them in one pass over all
entries (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, arXiv:2211.17192, with the
model as its own draft). mlx-lm's loop asks for one token at a time, samples and processes logits as ever, and gets
those of the full caches: already computed if it asks for a token that was drafted.
"""

import contextlib
import sys
import time
from collections.abc import Iterator

import mlx.core as mx

from ..caches.layers import layer_caches
from ..several.shard import shard_of
from .report import Verified

MOST_DRAFTS = 16
FIRST_DRAFTS = 4
FADING = 0.8  # what a round's figures count for in the next one's
PATIENCE = 100  # tokens after which drafting must have gained something


class SelfSpeculation:
    """Makes a model's calls of one token on full caches, ahead of time where its drafts were right.

    Args:
        model: an mlx-lm model whose attention classes are patched.
        full, small: its caches with all entries, and those to draft with.
        verified: where tokens and drafts are counted.
    """

    def __init__(self, model, full: list, small: list, verified: Verified):
        self._model = model
        self._full, self._small = full, small
        self._verified = verified
        self._n_drafts = 0  # of the last round
        self._ahead: list[tuple[int, mx.array]] = []  # drafts, and the logits after each
        self._unread: list[int] = []  # tokens that the small caches have not read
        self._pace = _Pace(verified)

    def __call__(self, inputs: mx.array, cache: list) -> mx.array:
        token: int = inputs.item()  # type: ignore[assignment]
        self._verified.tokens += 1
        if self._ahead and token == self._ahead[0][0]:
            self._verified.accepted += 1
            return self._ahead.pop(0)[1]
        with self._pace.round():
            if self._n_drafts:
                n_right = self._n_drafts - len(self._ahead)
                self._pace.judged(n_right, wrong=min(1, len(self._ahead)))
            self.close()
            # By the clock, which every rank has its own of.
            n_drafts = shard_of(self._model).ranks.first(self._pace.n_drafts())
            return self._round(token, n_drafts)

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
        started = time.perf_counter()
        tokens = [mx.array([[token]])]
        unread = mx.array([[*self._unread, token]])
        for _ in range(n_drafts):
            logits = self._model(unread, cache=self._small)
            unread = mx.argmax(logits[:, -1:], axis=-1)
            tokens.append(unread)
        checked = mx.concatenate(tokens, axis=1)
        mx.eval(checked)
        read = time.perf_counter()
        logits = self._verify(checked)
        self._pace.drafted(n_drafts, read - started, time.perf_counter() - read)
        drafts: list[int] = checked[0, 1:].tolist()  # type: ignore[assignment]
        self._ahead = [(draft, logits[:, i : i + 1]) for i, draft in enumerate(drafts, start=1)]
        self._verified.drafted += n_drafts
        self._n_drafts, self._unread = n_drafts, drafts[-1:]
        return logits[:, :1]

    def _verify(self, tokens: mx.array) -> mx.array:
        logits = self._model(tokens, cache=self._full)
        mx.eval(logits)
        return logits


class _Pace:
    """How many drafts a round is to make, by what rounds have cost and how many drafts were right."""

    def __init__(self, verified: Verified):
        self._verified = verified
        self._plain_rounds = 2  # without drafts: to be measured, or since drafts gain nothing
        self._before = (0, 0.0)  # tokens and seconds when drafts were last found to gain something
        self._right, self._judged = 2.4, 3.0  # drafts, the newer the more they count
        self._warm = False
        self._draft_seconds: float | None = None  # of a draft, and of its part in the verification
        self._check_seconds = 0.0

    def n_drafts(self) -> int:
        """The number that promises most tokens a second; 0 in a plain round."""
        if self._plain_rounds:
            return 0
        if self._draft_seconds is None:
            return FIRST_DRAFTS
        chance, draft = self._right / self._judged, self._draft_seconds + self._check_seconds

        def speed(n: int) -> float:
            tokens = sum(chance**i for i in range(n + 1))
            return tokens / (self._verified.plain_seconds + n * draft)

        return max(range(1, MOST_DRAFTS + 1), key=speed)

    def judged(self, right: int, wrong: int) -> None:
        """Count a round's drafts."""
        self._right = FADING * self._right + right
        self._judged = FADING * self._judged + right + wrong

    def drafted(self, n: int, seconds: float, check_seconds: float) -> None:
        """Count what `n` drafts and their verification took; the first time only warms up."""
        if not self._warm:
            self._warm = True
            return
        draft = seconds / n
        check = max(0.0, check_seconds - self._verified.plain_seconds) / n
        if self._draft_seconds is None:
            self._draft_seconds, self._check_seconds = draft, check
        self._draft_seconds += (1 - FADING) * (draft - self._draft_seconds)
        self._check_seconds += (1 - FADING) * (check - self._check_seconds)

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """Time a round, and give up drafting if the last `PATIENCE` tokens gained nothing."""
        verified, started = self._verified, time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        verified.seconds += seconds
        if self._plain_rounds:
            self._plain_rounds -= 1
            verified.plain_seconds = min(verified.plain_seconds or seconds, seconds)
        elif (n := verified.tokens - self._before[0]) < PATIENCE:
            return
        elif verified.seconds - self._before[1] >= n * verified.plain_seconds:
            self._plain_rounds = sys.maxsize
        self._before = verified.tokens, verified.seconds
