"""Constrained decoding: the logits processor that keeps an answer to its grammar."""

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from ..errors import SnapKVError
from .grammar import Form
from .matcher import make_matcher, reason_of, vocabulary

CLOSERS = '}]",:0'  # what ends JSON soonest, the best first
QUOTE, IN_STRING = '"', "~"  # what ends a string; where this may come, a string has begun
LONGEST_END = 512  # tokens
GROWTH = 3  # by how many tokens the way to the end may grow with a token


class Constraint:
    """A logits processor that leaves only the tokens that a form allows; after its end, the end of the answer.

    mlx-lm's loops ask for it once a token, before they know the token: they hand it over as an array. Loops with
    drafts go back to an earlier token, and so does this. JSON that is about to reach `max_tokens` is closed; a call is
    not, lest somebody carries it out.

    Attributes:
        is_cut: the answer was closed before the model had said all.

    Raises: SnapKVError: the form's grammar is none.
    """

    def __init__(self, tokenizer, form: Form, max_tokens: int = -1):
        self.form, self.is_cut = form, False
        self._vocabulary = vocabulary(tokenizer)
        self._matcher = make_matcher(tokenizer, form.grammar)
        self._matcher.consume_tokens(tokenizer.encode(form.begun, add_special_tokens=False))
        self._n_prompt: int | None = None
        self._answer: list[int] = []
        self._n_matched = 0  # of these; the matcher takes no token after its end
        self._max_tokens = max_tokens if form.kind == "json" else -1
        self._next_look = max_tokens  # how many tokens are left when the end is looked for

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        if self._n_prompt is None:
            self._n_prompt = tokens.size
        is_next = tokens.size - self._n_prompt == len(self._answer) + 1
        new = tokens[-1 if is_next else self._n_prompt :]
        # The device goes on with the logits while the mask is made, which needs only the tokens before them.
        mx.async_eval(new)
        mx.async_eval(logits)
        new_tokens: Any = new.tolist()
        if not is_next:
            n_same = sum(1 for _ in _same(new_tokens, self._answer))
            self._rewind(n_same)
            new_tokens = new_tokens[n_same:]
        self._take(new_tokens)
        allowed = _allowed(self._matcher, logits.shape[-1])
        if self._matcher.is_error():
            raise _failure(self._matcher)
        if (forced := self._closing()) is not None:
            allowed[:] = False
            allowed[forced] = True
        return mx.where(mx.array(allowed), logits, -mx.inf)

    def _take(self, tokens: list[int]) -> None:
        for token in tokens:
            self._answer.append(token)
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
                self._n_matched += 1

    def _rewind(self, n: int) -> None:
        del self._answer[n:]
        if self._n_matched > n:
            self._matcher.rollback(self._n_matched - n)
            self._n_matched = n
        self.is_cut, self._next_look = False, self._max_tokens

    def _closing(self) -> int | None:
        """The next token of a short way to the end, if hardly more tokens are left than it has."""
        n_left = self._max_tokens - len(self._answer)
        if self._max_tokens < 0 or n_left > self._next_look or self._matcher.is_stopped():
            return None
        end = _short_end(self._matcher, self._vocabulary, min(n_left, LONGEST_END))
        n_end = 0 if end is None else len(end)
        if end:
            self.is_cut = n_end + 2 * GROWTH >= n_left
        elif self.is_cut:
            end = [self._vocabulary.eos_token]
        n_free = 0 if self.is_cut else (n_left - n_end) // (GROWTH + 1)
        self._next_look = n_left - 1 - n_free
        return end[0] if end and self.is_cut else None


def _allowed(matcher: LLMatcher, size: int) -> np.ndarray:
    """Whether each token may come next, `(size,)`."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(bits, count=size, bitorder="little").view(bool)


def _short_end(matcher: LLMatcher, tokenizer: LLTokenizer, most: int) -> list[int] | None:
    """Few tokens, `most` at most, after which the grammar lets an answer end; None if those found are more."""
    matcher, tokens = matcher.deep_copy(), list[int]()
    quote, in_string, *closers = (
        tokenizer.greedy_tokenize(c)[0] for c in (QUOTE, IN_STRING, *CLOSERS)
    )
    was_in_string = False
    while not matcher.is_accepting():
        new = matcher.compute_ff_tokens()
        if not new:
            bits = matcher.compute_bitmask()
            may_come = [t for t in (in_string, quote, *closers) if bits[t // 8] >> t % 8 & 1]
            is_in_string = may_come[:2] == [in_string, quote]
            if is_in_string and was_in_string:
                return None  # a quote ends every string of JSON, so these are thoughts
            was_in_string = is_in_string
            best = [quote] if is_in_string else [t for t in closers if t in may_come]
            new = best[:1] or [int(_allowed(matcher, tokenizer.vocab_size).argmax())]
        tokens += new
        if len(tokens) > most or not matcher.consume_tokens(new):
            return None
    return tokens


def _same(*sequences: list[int]) -> Iterator[int]:
    """Yield the elements with which all of them begin."""
    for a, b in zip(*sequences):
        if a != b:
            return
        yield a


def _failure(matcher: LLMatcher) -> Exception:
    """Why an answer can't go on: its form takes too much, or what was sampled is not what was allowed."""
    why = reason_of(matcher)
    if "satisfy the grammar" in why:
        return RuntimeError(f"the answer has left its grammar: {why}")
    return SnapKVError(f"the answer's schema is too complex to be enforced: {why}")
