"""Constrained decoding: a logits processor that makes an answer follow a grammar."""

import itertools
import math
import re
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher

from ..errors import Option, SnapKVError
from .grammar import AnswerFormat
from .matcher import make_matcher, reason_of, vocabulary
from .short_end import FreeText, allowed_tokens, is_in_string, short_end

NO_QUOTES = r'start: /[^"\\]*/'  # text that can't end a JSON string
# Within a string, a token lengthens the short end by at most this many tokens: the rest of a character.
MAX_GROWTH_IN_STRING = 3
MAX_END = 512  # maximum length of a short end during the answer, in tokens
MAX_FIRST_END = 4096  # the same, before the answer starts
REPEATED = r'"min(?:Items|Length|Properties)": (\d+)'  # a schema's minimum counts
# Near `max_tokens`, at most this many tokens are tried, most likely first.
MAX_CANDIDATES = 8
# If the short end is longer than this, trying a token takes milliseconds. Then fewer tokens are tried: the most likely
# ones that together have probability CANDIDATES_SHARE.
SHORT_END = 32  # tokens
CANDIDATES_SHARE = 0.99


class Constraint:
    """A logits processor that allows only tokens that follow the answer's grammar.

    mlx-lm's loops call it once per token, with all tokens so far. The last token may still be an unevaluated array.
    Loops with a draft model go back to earlier tokens, and the constraint goes back with them.

    For JSON, enough of `max_tokens` is reserved to close it. Tokens that would leave too few are not allowed. If the
    model's first choice is such a token, the JSON is closed there. Calls are never closed early, because the client
    would run them with truncated arguments.

    Args:
        tokenizer: the model's tokenizer, for which the grammar is compiled.
        answer_format: the grammar, the kind of answer, and the text that the answer continues.
        max_tokens: maximum number of tokens in the answer, or -1 for no limit.

    Attributes:
        format: the answer's format.
        is_cut: whether the JSON was closed before the model ended it.

    Raises: SnapKVError: the grammar can't be enforced, or the JSON needs more than `max_tokens`.
    """

    def __init__(self, tokenizer, answer_format: AnswerFormat, max_tokens: int = -1):
        """Compile the grammar, consume the prefill, and check that `max_tokens` is enough."""
        self.format = answer_format
        self.is_cut = False
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary(tokenizer)
        self._matcher = make_matcher(tokenizer, answer_format.grammar)
        prefill = tokenizer.encode(answer_format.prefill, add_special_tokens=False)
        self._matcher.consume_tokens(prefill)
        self._n_prompt: int | None = None
        self._answer: list[int] = []
        # Number of answer tokens that the matcher has consumed. It stops at the end of the grammar.
        self._n_matched = 0
        self._max_tokens = max_tokens if answer_format.kind == "json" else -1
        # Upper bound on how many tokens one token adds to the short end. A token may start an object or array whose
        # required contents must then follow. Without repetitions, they are no longer than the schema.
        n_grammar = len(self._vocabulary.greedy_tokenize(answer_format.grammar))
        repeated = map(int, re.findall(REPEATED, answer_format.grammar))
        self._max_growth = n_grammar * math.prod(max(1, n) for n in repeated)
        # Number of remaining tokens at which to look for a short end again.
        self._next_look = max_tokens
        # Short ends found while trying tokens, keyed by the token tried.
        self._known_ends: dict[int, list[int] | None] = {}
        self._end: list[int] | None = None  # tokens that still have to close the JSON
        self._require_enough_tokens()

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Set the logits of disallowed tokens to -inf.

        Args:
            tokens: token ids of the prompt and the answer so far.
            logits: `(1, vocabulary)`.
        """
        if self._n_prompt is None:
            self._n_prompt = tokens.size
        n_answer = tokens.size - self._n_prompt
        is_next = n_answer == len(self._answer) + 1
        # After going back, any answer token may differ.
        first_new = -1 if is_next else self._n_prompt
        new = tokens[first_new:]
        # The mask depends only on the tokens, so the CPU builds it while the device computes the logits.
        mx.async_eval(new)
        mx.async_eval(logits)
        new_tokens: Any = new.tolist()
        if not is_next:
            n_same = _common_prefix_length(new_tokens, self._answer)
            self._rewind(n_same)
            new_tokens = new_tokens[n_same:]
        self._consume(new_tokens)
        allowed = allowed_tokens(self._matcher, logits.shape[-1])
        if self._matcher.is_error():
            raise _failure(self._matcher)
        allowed = self._keep_an_end(allowed, logits)
        return mx.where(mx.array(allowed), logits, -mx.inf)

    def _consume(self, tokens: list[int]) -> None:
        """Append tokens to the answer, and feed them to the matcher until it stops."""
        for token in tokens:
            self._answer.append(token)
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
                self._n_matched += 1

    def _rewind(self, n: int) -> None:
        """Drop all but the first `n` answer tokens."""
        del self._answer[n:]
        if self._n_matched > n:
            self._matcher.rollback(self._n_matched - n)
            self._n_matched = n
        self.is_cut = False
        self._end = None
        self._known_ends = {}
        self._next_look = self._max_tokens

    def _require_enough_tokens(self) -> None:
        """Check that a short JSON answer fits into `max_tokens`, unless reasoning may precede it.

        Raises: SnapKVError: it does not fit.
        """
        if self._max_tokens < 0:
            return
        try:
            end = short_end(self._matcher, self._vocabulary, MAX_FIRST_END)
        except FreeText:
            return
        if end is not None and len(end) > self._max_tokens:
            raise SnapKVError(
                "{} is too few for JSON that obeys the schema: a short answer takes {} tokens",
                Option("max_tokens", self._max_tokens),
                len(end),
            )

    def _keep_an_end(self, allowed: np.ndarray, logits: mx.array) -> np.ndarray:
        """Return which allowed tokens leave room for a short end, bool `(vocabulary,)`.

        If the most likely token does not, the JSON is closed: `is_cut` is set, and from then on only the tokens of the
        short end are allowed.

        Looking for an end is too slow to do at every token. Each token lengthens the end by at most `_max_growth`, so
        the next look is due after `(n_left - n_end) // (_max_growth + 1)` tokens.
        """
        n_left = self._max_tokens - len(self._answer)
        if self._end is not None:
            following, *self._end = self._end or [self._vocabulary.eos_token]
            return _only(allowed, [following])
        if self._max_tokens < 0 or n_left > self._next_look or self._matcher.is_stopped():
            return allowed
        known_ends = self._known_ends
        self._known_ends = {}
        last = self._answer[-1] if self._answer else None
        end = known_ends[last] if last in known_ends else self._look(self._matcher, n_left)
        n_end = 0 if end is None else len(end)
        n_free = n_left - n_end
        self._next_look = n_left - max(1, n_free // (self._max_growth + 1))
        if end is None or n_free > self._max_growth:
            return allowed
        is_free = np.zeros_like(allowed)  # tokens known to leave room for the end
        bits = self._matcher.compute_bitmask()
        if n_free > MAX_GROWTH_IN_STRING and is_in_string(bits, self._vocabulary):
            is_free = allowed & self._without_quotes[: allowed.size]
        share = math.inf if n_end <= SHORT_END else CANDIDATES_SHARE
        likeliest = _likeliest(allowed, logits, share)
        fitting = [token for token in likeliest if is_free[token] or self._fits(token, n_left - 1)]
        if likeliest[:1] == fitting[:1]:
            return is_free | _only(allowed, fitting)
        self.is_cut = True
        self._end = end
        return self._keep_an_end(allowed, logits)

    def _look(self, matcher: LLMatcher, n_left: int) -> list[int] | None:
        """Return a short end of at most `n_left` tokens. Return None if no end is found or reasoning may come first."""
        try:
            return short_end(matcher, self._vocabulary, min(n_left, MAX_END))
        except FreeText:
            return None

    def _fits(self, token: int, n_left: int) -> bool:
        """Return whether the JSON can end within `n_left` tokens after `token`. Tokens of reasoning always fit."""
        ahead = self._matcher.deep_copy()
        if not ahead.consume_token(token):
            return False
        if ahead.is_stopped():
            return True
        try:
            end = short_end(ahead, self._vocabulary, min(n_left, MAX_END))
        except FreeText:
            return True
        self._known_ends[token] = end
        return end is not None

    @cached_property
    def _without_quotes(self) -> np.ndarray:
        """Return which tokens contain neither quotes nor backslashes, bool `(vocabulary,)`."""
        matcher = make_matcher(self._tokenizer, NO_QUOTES)
        size = 8 * len(matcher.compute_bitmask())
        return allowed_tokens(matcher, size)


def _likeliest(allowed: np.ndarray, logits: mx.array, share: float) -> list[int]:
    """Return up to `MAX_CANDIDATES` allowed tokens, most likely first.

    The list ends early once its tokens have a total probability of more than `share`.
    """
    n = min(MAX_CANDIDATES, int(allowed.sum()))
    probabilities = mx.softmax(mx.where(mx.array(allowed), logits[0], -mx.inf), precise=True)
    order = mx.argsort(-probabilities)[:n]
    shares_before: Any = mx.cumsum(probabilities[order], inclusive=False).tolist()
    tokens: Any = order.tolist()
    return [token for token, before in zip(tokens, shares_before) if before <= share]


def _only(allowed: np.ndarray, tokens: list[int]) -> np.ndarray:
    """Return a mask that allows only `tokens`."""
    mask = np.zeros_like(allowed)
    mask[tokens] = True
    return mask


def _common_prefix_length(first: list[int], second: list[int]) -> int:
    """Return the length of the common prefix of two lists."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second))
    return sum(1 for _ in pairs)


def _failure(matcher: LLMatcher) -> Exception:
    """Return the error for a failed matcher: the schema is too complex, or the answer has left the grammar."""
    why = reason_of(matcher)
    if "satisfy the grammar" in why:
        return RuntimeError(f"the answer has left its grammar: {why}")
    return SnapKVError(f"the answer's schema is too complex to be enforced: {why}")
