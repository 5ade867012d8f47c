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

NO_QUOTES = r'start: /[^"\\]*/'  # grammar of text that does not end a string
# Maximum tokens by which a part of a string may lengthen a short end: the rest of a character.
MAX_GROWTH_IN_STRING = 3
MAX_END = 512  # maximum tokens of a short end within an answer
MAX_FIRST_END = 4096  # maximum tokens of a short end before the answer
REPEATED = r'"min(?:Items|Length|Properties)": (\d+)'  # how often a schema requires a part
# Maximum number of tokens that are tried near the end of the answer, most likely first.
MAX_CANDIDATES = 8
# After a longer end, which takes milliseconds to find, only tokens that together have this probability are tried.
SHORT_END = 32  # tokens
CANDIDATES_SHARE = 0.99


class Constraint:
    """A logits processor that allows only tokens of the answer's format, followed by the end of the answer.

    mlx-lm's loops call it once per token, with all tokens so far. The last token is still an array that may not have
    been computed. Loops with a draft model go back to earlier tokens, and the constraint follows.

    For JSON, enough of `max_tokens` is reserved for a short end. A token that would leave too few is not allowed; if it
    is the model's choice, the JSON is closed. Calls are never closed, because the client would run them with truncated
    arguments.

    Args:
        tokenizer: the model's tokenizer, for whose tokens the grammar is compiled.
        answer_format: the grammar, the kind of answer, and the text that the answer continues.
        max_tokens: maximum number of tokens in the answer; -1 for no limit.

    Attributes:
        format: the answer's format.
        is_cut: whether the answer was closed before the model ended it.

    Raises: SnapKVError: the grammar can't be enforced, or the JSON needs more than `max_tokens`.
    """

    def __init__(self, tokenizer, answer_format: AnswerFormat, max_tokens: int = -1):
        """Compile the grammar, advance past the prefill that the answer continues, and find a short end."""
        self.format = answer_format
        self.is_cut = False
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary(tokenizer)
        self._matcher = make_matcher(tokenizer, answer_format.grammar)
        prefill = tokenizer.encode(answer_format.prefill, add_special_tokens=False)
        self._matcher.consume_tokens(prefill)
        self._n_prompt: int | None = None
        self._answer: list[int] = []
        # Number of answer tokens that the matcher has consumed. After its end it consumes none.
        self._n_matched = 0
        self._max_tokens = max_tokens if answer_format.kind == "json" else -1
        # One token may start a part of the JSON, and thereby require everything that the schema requires of this part.
        # This is not longer than the schema, unless parts are repeated.
        n_grammar = len(self._vocabulary.greedy_tokenize(answer_format.grammar))
        repeated = map(int, re.findall(REPEATED, answer_format.grammar))
        self._max_growth = n_grammar * math.prod(max(1, n) for n in repeated)
        # Number of remaining tokens at which a short end is searched again.
        self._next_look = max_tokens
        # Short ends that were found while a token was tried, by this token.
        self._known_ends: dict[int, list[int] | None] = {}
        self._end: list[int] | None = None  # the tokens that close the JSON, if it is cut
        self._require_enough_tokens()

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Set the logits of tokens that are not allowed to -inf.

        Args:
            tokens: token ids of the prompt and the answer so far.
            logits: `(1, vocabulary)`.
        """
        if self._n_prompt is None:
            self._n_prompt = tokens.size
        n_answer = tokens.size - self._n_prompt
        is_next = n_answer == len(self._answer) + 1
        # After going back, any token of the answer may have changed.
        first_new = -1 if is_next else self._n_prompt
        new = tokens[first_new:]
        # The mask depends only on tokens, so the device computes the logits while the CPU makes the mask.
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
        """Add tokens to the answer. The matcher consumes them until its end."""
        for token in tokens:
            self._answer.append(token)
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
                self._n_matched += 1

    def _rewind(self, n: int) -> None:
        """Go back to the first `n` tokens of the answer."""
        del self._answer[n:]
        if self._n_matched > n:
            self._matcher.rollback(self._n_matched - n)
            self._n_matched = n
        self.is_cut = False
        self._end = None
        self._known_ends = {}
        self._next_look = self._max_tokens

    def _require_enough_tokens(self) -> None:
        """Check `max_tokens`. Raises: SnapKVError: the shortest JSON is longer, and no reasoning precedes it."""
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
        """Return which allowed tokens leave enough tokens for a short end of the JSON, bool `(vocabulary,)`.

        If the most likely token does not, the JSON is closed: `is_cut` is set, and only the tokens of the end are
        allowed.

        Searching for an end takes time, so it is not done for every token. A token lengthens the end by at most
        `_max_growth`, so the next search is due after `(n_left - n_end) // (_max_growth + 1)` tokens.
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
        is_free = np.zeros_like(allowed)  # tokens that leave enough for the end
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
        """Return a short end of at most `n_left` tokens; None without one, or if reasoning precedes the JSON."""
        try:
            return short_end(matcher, self._vocabulary, min(n_left, MAX_END))
        except FreeText:
            return None

    def _fits(self, token: int, n_left: int) -> bool:
        """Return whether the JSON can end within `n_left` tokens after a token, or the token starts reasoning."""
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
        """Return which tokens have neither quotes nor backslashes, bool `(vocabulary,)`."""
        matcher = make_matcher(self._tokenizer, NO_QUOTES)
        size = 8 * len(matcher.compute_bitmask())
        return allowed_tokens(matcher, size)


def _likeliest(allowed: np.ndarray, logits: mx.array, share: float) -> list[int]:
    """Return up to `MAX_CANDIDATES` allowed tokens, most likely first; fewer if they have probability `share`."""
    n = min(MAX_CANDIDATES, int(allowed.sum()))
    probabilities = mx.softmax(mx.where(mx.array(allowed), logits[0], -mx.inf), precise=True)
    order = mx.argsort(-probabilities)[:n]
    shares_before: Any = mx.cumsum(probabilities[order], inclusive=False).tolist()
    tokens: Any = order.tolist()
    return [token for token, before in zip(tokens, shares_before) if before <= share]


def _only(allowed: np.ndarray, tokens: list[int]) -> np.ndarray:
    """Return a mask that allows only these tokens."""
    mask = np.zeros_like(allowed)
    mask[tokens] = True
    return mask


def _common_prefix_length(first: list[int], second: list[int]) -> int:
    """Return the number of tokens that both lists share at their start."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second))
    return sum(1 for _ in pairs)


def _failure(matcher: LLMatcher) -> Exception:
    """Return the error for a failed matcher: the format is too complex, or a token was not allowed."""
    why = reason_of(matcher)
    if "satisfy the grammar" in why:
        return RuntimeError(f"the answer has left its grammar: {why}")
    return SnapKVError(f"the answer's schema is too complex to be enforced: {why}")
