"""Exact answers, self-speculative: the model drafts tokens on small caches, and verifies them in one pass over all
entries (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, arXiv:2211.17192, with the
model as its own draft). mlx-lm's loop asks for one token at a time, samples and processes logits as ever, and gets
those of the full caches: already computed if it asks for a token that was drafted. `DraftLength` says how many tokens
are drafted, and when none are any more: from then on the calls are the model's own, on the full caches.
"""

from time import perf_counter

import mlx.core as mx

from ..caches.layers import layer_caches
from ..models.capture import blockwise
from ..several.shard import shard_of
from .draft_length import DraftLength
from .pieces import Pieces
from .report import Verified


class SelfSpeculation:
    """Makes calls of one token of a model, whose attention classes are patched, ahead of time where drafts were right.

    It drafts on its `small` caches, checks on its `full` ones as many tokens as its `pieces` allow, and counts both in
    `verified`.
    """

    def __init__(
        self, model, full: list, small: list, verified: Verified, pieces: Pieces | None = None
    ):
        self._model, self._full, self._small, self._verified = model, full, small, verified
        self._pieces = pieces
        self._length, self._n_drafts = DraftLength(), 0  # of the last round
        self._ahead: list[tuple[int, mx.array]] = []  # drafts, and the logits after each

    def __call__(self, inputs: mx.array, cache: list) -> mx.array:
        self._verified.tokens += 1
        if self._verified.stopped is not None:
            return self._model(inputs, cache=self._full)
        token: int = inputs.item()  # type: ignore[assignment]
        if self._ahead and token == self._ahead[0][0]:
            self._verified.accepted += 1
            return self._ahead.pop(0)[1]
        self._length.yielded(self._n_drafts, self._n_drafts - len(self._ahead))
        started = perf_counter()
        self.close()
        # By the clock, which every rank has its own of.
        ranks = shard_of(self._model).ranks
        n_drafts, stopped = ranks.first((self._length.next(), self._length.stopped))
        if self._pieces is not None:
            n_drafts = min(n_drafts, self._pieces.at_once(self._full, least=1) - 1)
        logits = self._round(token, n_drafts)
        self._verified.seconds += perf_counter() - started
        self._verified.plain_seconds = self._length.plain
        if stopped:
            self._verified.stopped = self._verified.tokens
        return logits

    def close(self) -> None:
        """Roll back the drafts that were not used."""
        n_right = self._n_drafts - len(self._ahead)
        for cache in layer_caches(self._full):
            cache.rollback(len(self._ahead))
        # The small caches have not read the last draft.
        for cache in layer_caches(self._small):
            cache.rollback(max(0, self._n_drafts - 1 - n_right))
        self._ahead, self._n_drafts = [], 0

    def _round(self, token: int, n_drafts: int) -> mx.array:
        """Logits `(1, 1, vocab_size)` after a token, and drafts ahead of it."""
        started = perf_counter()
        drafted = self._drafted(token, n_drafts)
        drafted_by = perf_counter()
        with blockwise():
            logits = self._model(drafted, cache=self._full)
            mx.eval(logits)
        self._length.took(n_drafts, drafted_by - started, perf_counter() - drafted_by)
        drafts: list[int] = drafted[0, 1:].tolist()  # type: ignore[assignment]
        self._ahead = [(draft, logits[:, i : i + 1]) for i, draft in enumerate(drafts, start=1)]
        self._verified.drafted += n_drafts
        self._n_drafts = n_drafts
        return logits[:, :1]

    def _drafted(self, token: int, n_drafts: int) -> mx.array:
        """A token and drafts of the next ones, `(1, 1 + n_drafts)`, evaluated."""
        if n_drafts:
            self._catch_up()
        tokens = [mx.array([[token]])]
        for _ in range(n_drafts):
            logits = self._model(tokens[-1], cache=self._small)
            tokens.append(mx.argmax(logits[:, -1:], axis=-1))
        drafted = mx.concatenate(tokens, axis=1)
        mx.eval(drafted)
        return drafted

    def _catch_up(self) -> None:
        """Give the small caches the entries of tokens that only the full ones have read."""
        for full, small in zip(layer_caches(self._full), layer_caches(self._small)):
            if small.offset < full.offset:
                small.append(full.held().between(small.offset, full.offset))  # type: ignore[attr-defined]
