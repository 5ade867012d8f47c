"""Constrained decoding: a logits processor that makes an answer follow a grammar."""

import math
import re
from functools import cached_property
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from ..engine.token_ids import common_prefix
from ..errors import Option, SnapKVError
from .grammar import AnswerFormat
from .matcher import error_reason, llguidance_tokenizer, make_matcher
from .short_end import FreeText, allowed_tokens, is_in_string, short_end

# A "short end" is a short sequence of tokens that completes the JSON.

NO_QUOTES = r'start: /[^"\\]*/'  # text that can't end a JSON string
# Inside a string, a token without quotes or backslashes lengthens the short end only if it leaves a character
# incomplete. Completing the character takes at most this many tokens.
MAX_END_GROWTH_IN_STRING = 3
MAX_END_LENGTH = 512  # maximum length of a short end once the answer has started, in tokens
MAX_FIRST_END_LENGTH = 4096  # maximum length of a short end before the answer starts, in tokens
MIN_COUNT = re.compile(r'"min(?:Items|Length|Properties)": (\d+)')  # e.g. `"minItems": 3`
# Near `max_tokens`, at most this many tokens are tried per position, starting with the most likely.
MAX_CANDIDATES = 8
# If the short end is longer than this, trying a token takes milliseconds, so only the most likely tokens are tried, up
# to a cumulative probability of CANDIDATES_SHARE.
QUICK_END_LENGTH = 32
CANDIDATES_SHARE = 0.99


class Constraint:
    """A logits processor that allows only tokens that follow the answer's grammar.

    mlx-lm's generation loops call the constraint once per token, with all tokens so far. The last token may not have
    been computed yet. When a loop with a draft model drops rejected tokens, the constraint drops them too.

    Near `max_tokens`, enough tokens are reserved to close the JSON. A token that would leave too few tokens is not
    allowed. If that token is the model's most likely one, the JSON is closed at once. Calls are never closed early,
    because the client would run them with truncated arguments.

    Args:
        tokenizer: the model's tokenizer. The grammar is compiled for it.
        answer_format: the grammar, the kind of answer, and the text that the answer continues.
        max_tokens: maximum number of tokens in the answer, or -1 for no limit.

    Attributes:
        format: the answer's format.

    Raises: SnapKVError: the grammar can't be enforced, or `max_tokens` is too small for the JSON.
    """

    def __init__(self, tokenizer, answer_format: AnswerFormat, max_tokens: int = -1):
        """Compile the grammar, consume the prefill, and check that `max_tokens` is enough."""
        self.format = answer_format
        self._tokenizer = tokenizer
        self._vocabulary = llguidance_tokenizer(tokenizer)
        self._matcher = make_matcher(tokenizer, answer_format.grammar)
        prefill_tokens = tokenizer.encode(answer_format.prefill, add_special_tokens=False)
        self._matcher.consume_tokens(prefill_tokens)
        self._n_prompt: int | None = None
        self._answer_tokens: list[int] = []
        # Number of answer tokens that the matcher has consumed. Once the matcher has stopped, it consumes no more.
        self._n_consumed = 0
        self._max_tokens = max_tokens if answer_format.kind == "json" else -1
        self._max_end_growth = _max_end_growth(answer_format.grammar, self._vocabulary)
        # Search for a short end again once at most this many tokens are left.
        self._n_left_at_next_search = max_tokens
        # Maps each token that was tried at the next position to the short end after that token.
        self._end_after_candidate: dict[int, list[int] | None] = {}
        # While the JSON is being closed: the tokens that close it, and the number of answer tokens before them.
        self._closing_tokens: list[int] = []
        self._closing_start = 0
        self._require_enough_tokens()

    @property
    def closed_early(self) -> bool:
        """Return whether the JSON was closed before the model ended it."""
        return bool(self._closing_tokens)

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Set the logits of disallowed tokens to -inf.

        Args:
            tokens: token ids of the prompt and the answer so far.
            logits: `(1, vocabulary)`.

        Raises:
            SnapKVError: the schema is too complex to be enforced.
            RuntimeError: the answer violates its grammar.
        """
        if self._n_prompt is None:
            self._n_prompt = tokens.size
        n_answer = tokens.size - self._n_prompt
        has_one_more = n_answer == len(self._answer_tokens) + 1
        # If there is not exactly one new token, the loop may have dropped and replaced answer tokens, so read the whole
        # answer again.
        unread_tokens = tokens[-1:] if has_one_more else tokens[self._n_prompt :]
        # Start computing the logits, so that the CPU can build the mask in the meantime. The mask rarely depends on the
        # logits.
        mx.async_eval(unread_tokens)
        mx.async_eval(logits)
        new_tokens: Any = unread_tokens.tolist()
        if not has_one_more:
            n_same = common_prefix([new_tokens, self._answer_tokens])
            new_tokens = new_tokens[n_same:]
            self._roll_back(n_same, new_tokens)
        self._consume(new_tokens)
        allowed = allowed_tokens(self._matcher, logits.shape[-1])
        if self._matcher.is_error():
            raise _matcher_error(self._matcher)
        allowed = self._keep_room_to_end(allowed, logits)
        return mx.where(mx.array(allowed), logits, -mx.inf)

    def _consume(self, tokens: list[int]) -> None:
        """Append tokens to the answer, and feed them to the matcher until it stops."""
        for token in tokens:
            self._answer_tokens.append(token)
            if not self._matcher.is_stopped():
                self._matcher.consume_token(token)
                self._n_consumed += 1

    def _roll_back(self, n_kept: int, new_tokens: list[int]) -> None:
        """Drop all but the first `n_kept` answer tokens. `new_tokens` are going to follow them.

        The JSON is still being closed if the tokens before the first closing token are kept, and that token is kept or
        is the first of the new tokens.
        """
        del self._answer_tokens[n_kept:]
        if self._n_consumed > n_kept:
            self._matcher.rollback(self._n_consumed - n_kept)
            self._n_consumed = n_kept
        closed_with = [*self._answer_tokens, *new_tokens][self._closing_start :]
        is_still_closing = closed_with[:1] == self._closing_tokens[:1]
        if n_kept < self._closing_start or not is_still_closing:
            self._closing_tokens = []
        self._end_after_candidate = {}
        self._n_left_at_next_search = self._max_tokens

    def _require_enough_tokens(self) -> None:
        """Check that a short JSON answer fits within `max_tokens`, unless the answer starts inside reasoning.

        Raises: SnapKVError: it does not fit.
        """
        if self._max_tokens < 0:
            return
        try:
            end = short_end(self._matcher, self._vocabulary, MAX_FIRST_END_LENGTH)
        except FreeText:
            return
        if end is not None and len(end) > self._max_tokens:
            raise SnapKVError(
                "{} is too few for JSON that obeys the schema: a short answer takes {} tokens",
                Option("max_tokens", self._max_tokens),
                len(end),
            )

    def _keep_room_to_end(self, allowed: np.ndarray, logits: mx.array) -> np.ndarray:
        """Return `allowed`, restricted near `max_tokens` to tokens that leave room for a short end.

        If the most likely token leaves too little room, the JSON is closed: from then on only the short end's tokens
        are allowed. If no short end is found, `allowed` is not restricted.

        Searching for an end at every token would be too slow. `n_spare` is the number of tokens left beyond the end.
        Each answer token uses up one of them, and up to `_max_end_growth` more if it lengthens the end. So the next
        search is due after `n_spare // (_max_end_growth + 1)` tokens.

        Args:
            allowed: bool mask `(vocabulary,)` of the tokens that the grammar allows.
            logits: `(1, vocabulary)`.
        """
        if self.closed_early:
            return self._mask_of_closing_token(allowed.size)
        n_left = self._max_tokens - len(self._answer_tokens)
        is_unlimited = self._max_tokens < 0
        if is_unlimited or n_left > self._n_left_at_next_search or self._matcher.is_stopped():
            return allowed
        end = self._current_end(n_left)
        n_end = 0 if end is None else len(end)
        n_spare = n_left - n_end
        self._n_left_at_next_search = n_left - max(1, n_spare // (self._max_end_growth + 1))
        if end is None or n_spare > self._max_end_growth:
            return allowed
        surely_fitting = self._surely_fitting(allowed, n_spare)
        enough_share = math.inf if n_end <= QUICK_END_LENGTH else CANDIDATES_SHARE
        candidates = _likeliest_tokens(allowed, logits, enough_share)
        fitting_candidates = [
            token
            for token in candidates
            if surely_fitting[token] or self._token_fits(token, n_left - 1)
        ]
        likeliest_fits = candidates[:1] == fitting_candidates[:1]
        if likeliest_fits:
            return surely_fitting | _mask_of(fitting_candidates, allowed.size)
        self._closing_tokens = [*end, self._vocabulary.eos_token]
        self._closing_start = len(self._answer_tokens)
        return self._mask_of_closing_token(allowed.size)

    def _mask_of_closing_token(self, size: int) -> np.ndarray:
        """Return a mask `(size,)` that allows only the next closing token. The last one ends the answer."""
        n_closed = len(self._answer_tokens) - self._closing_start
        next_or_last = min(n_closed, len(self._closing_tokens) - 1)
        return _mask_of([self._closing_tokens[next_or_last]], size)

    def _current_end(self, n_left: int) -> list[int] | None:
        """Return a short end after the answer so far.

        If `_token_fits` has tried the answer's last token, the end that it found is reused. Return None if no end of at
        most `n_left` tokens is found, or if the answer is still reasoning.
        """
        end_after_candidate = self._end_after_candidate
        self._end_after_candidate = {}
        last_token = self._answer_tokens[-1] if self._answer_tokens else None
        if last_token in end_after_candidate:
            return end_after_candidate[last_token]
        try:
            return self._find_end(self._matcher, n_left)
        except FreeText:
            return None

    def _find_end(self, matcher: LLMatcher, n_left: int) -> list[int] | None:
        """Return a short end of at most `n_left` tokens, or None if none is found.

        Raises: FreeText: the answer is still reasoning.
        """
        return short_end(matcher, self._vocabulary, min(n_left, MAX_END_LENGTH))

    def _surely_fitting(self, allowed: np.ndarray, n_spare: int) -> np.ndarray:
        """Return a mask of the allowed tokens that certainly leave room for a short end, so they need not be tried.

        Inside a string, with enough tokens to spare, these are the allowed tokens without quotes or backslashes. In all
        other cases, the mask is empty.
        """
        has_spare_tokens = n_spare > MAX_END_GROWTH_IN_STRING
        if has_spare_tokens and is_in_string(self._matcher.compute_bitmask(), self._vocabulary):
            return allowed & self._tokens_without_quotes[: allowed.size]
        return np.zeros_like(allowed)  # no token

    def _token_fits(self, token: int, n_left: int) -> bool:
        """Return whether the JSON can end within `n_left` tokens after `token`. Reasoning tokens always fit."""
        matcher = self._matcher.deep_copy()
        if not matcher.consume_token(token):
            return False
        if matcher.is_stopped():
            return True
        try:
            end = self._find_end(matcher, n_left)
        except FreeText:
            return True
        self._end_after_candidate[token] = end
        return end is not None

    @cached_property
    def _tokens_without_quotes(self) -> np.ndarray:
        """Return a bool mask `(vocabulary,)` of the tokens without quotes or backslashes."""
        matcher = make_matcher(self._tokenizer, NO_QUOTES)
        vocabulary_size = 8 * len(matcher.compute_bitmask())  # the bitmask has one bit per token
        return allowed_tokens(matcher, vocabulary_size)


def _max_end_growth(grammar: str, vocabulary: LLTokenizer) -> int:
    """Return an upper bound on the number of tokens by which one token lengthens the short end.

    A token may start an object or array, whose required contents must then follow. The contents are at most as long as
    the grammar, multiplied by minimum counts such as `minItems`.
    """
    n_grammar_tokens = len(vocabulary.greedy_tokenize(grammar))
    min_counts = map(int, MIN_COUNT.findall(grammar))
    return n_grammar_tokens * math.prod(max(1, count) for count in min_counts)


def _likeliest_tokens(allowed: np.ndarray, logits: mx.array, enough_share: float) -> list[int]:
    """Return up to `MAX_CANDIDATES` allowed tokens, most likely first.

    The list stops early once its total probability exceeds `enough_share`.
    """
    n_candidates = min(MAX_CANDIDATES, int(allowed.sum()))
    allowed_logits = mx.where(mx.array(allowed), logits[0], -mx.inf)
    probabilities = mx.softmax(allowed_logits, precise=True)
    best_first = mx.argsort(-probabilities)[:n_candidates]
    # For each candidate, the total probability of all candidates that are more likely.
    shares_before: Any = mx.cumsum(probabilities[best_first], inclusive=False).tolist()
    tokens: Any = best_first.tolist()
    return [
        token for token, share_before in zip(tokens, shares_before) if share_before <= enough_share
    ]


def _mask_of(tokens: list[int], size: int) -> np.ndarray:
    """Return a bool mask `(size,)` that allows only `tokens`."""
    mask = np.zeros(size, bool)
    mask[tokens] = True
    return mask


def _matcher_error(matcher: LLMatcher) -> Exception:
    """Return the error for a failed matcher: the schema is too complex, or the answer violates the grammar."""
    why = error_reason(matcher)
    if "satisfy the grammar" in why:
        return RuntimeError(f"the answer has left its grammar: {why}")
    return SnapKVError(f"the answer's schema is too complex to be enforced: {why}")
