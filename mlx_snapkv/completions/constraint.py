"""Constrained decoding: the logits processor that makes an answer obey its grammar."""

import itertools
from typing import Any

import mlx.core as mx
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from ..errors import SnapKVError
from .grammar import AnswerFormat
from .matcher import make_matcher, reason_of, vocabulary

CLOSERS = '}]",:0'  # characters that bring JSON closer to its end, the best first
QUOTE = '"'
IN_STRING = "~"  # a character that JSON allows only within strings
MAX_END_LENGTH = 512  # tokens
MAX_GROWTH = 3  # tokens by which one token of the answer may lengthen the shortest end


class Constraint:
    """A logits processor that allows only tokens that the answer's format allows, and then the end of the answer.

    mlx-lm's loops call it once for each token, with all tokens so far. The last token is still an array, whose value
    may not have been computed. A loop with a draft model goes back to earlier tokens, and the constraint follows.

    Before JSON would reach `max_tokens`, it is closed as shortly as possible. A call is never closed, since the client
    would run it with arguments that are cut.

    Args:
        tokenizer: the model's tokenizer, whose tokens the grammar is compiled for.
        answer_format: the grammar, the kind of answer, and the text that the answer continues.
        max_tokens: limit of the answer's tokens; -1 for no limit.

    Attributes:
        format: the answer's format.
        is_cut: whether the answer was closed before the model ended it.

    Raises: SnapKVError: the grammar can't be enforced.
    """

    def __init__(self, tokenizer, answer_format: AnswerFormat, max_tokens: int = -1):
        """Compile the grammar, and go past the prefill that the answer continues."""
        self.format = answer_format
        self.is_cut = False
        self._vocabulary = vocabulary(tokenizer)
        self._matcher = make_matcher(tokenizer, answer_format.grammar)
        prefill = tokenizer.encode(answer_format.prefill, add_special_tokens=False)
        self._matcher.consume_tokens(prefill)
        self._n_prompt: int | None = None
        self._answer: list[int] = []
        # Tokens of the answer that the matcher has taken. It takes none after its end.
        self._n_matched = 0
        self._max_tokens = max_tokens if answer_format.kind == "json" else -1
        # Number of tokens left at which a short end is looked for again.
        self._next_look = max_tokens

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """Return logits with -inf for tokens that are not allowed.

        Args:
            tokens: the prompt and the answer so far.
            logits: `(1, vocabulary)`.
        """
        if self._n_prompt is None:
            self._n_prompt = tokens.size
        n_answer = tokens.size - self._n_prompt
        is_next = n_answer == len(self._answer) + 1
        # After going back, any token of the answer may be another one.
        first_new = -1 if is_next else self._n_prompt
        new = tokens[first_new:]
        # The mask needs only the tokens. The device computes the logits while the CPU makes the mask.
        mx.async_eval(new)
        mx.async_eval(logits)
        new_tokens: Any = new.tolist()
        if not is_next:
            n_same = _common_prefix_length(new_tokens, self._answer)
            self._rewind(n_same)
            new_tokens = new_tokens[n_same:]
        self._consume(new_tokens)
        allowed = _allowed(self._matcher, logits.shape[-1])
        if self._matcher.is_error():
            raise _failure(self._matcher)
        closing_token = self._closing_token()
        if closing_token is not None:
            allowed[:] = False
            allowed[closing_token] = True
        return mx.where(mx.array(allowed), logits, -mx.inf)

    def _consume(self, tokens: list[int]) -> None:
        """Add tokens to the answer, and give them to the matcher until its end."""
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
        self._next_look = self._max_tokens

    def _closing_token(self) -> int | None:
        """Return the next token of a short end of the JSON if it is time to close it; None otherwise.

        The JSON is closed if `n_end + 2 * MAX_GROWTH >= n_left`. Then `is_cut` is set.

        Looking for an end takes time, so it is not done for every token. Each token lengthens the end by at most
        `MAX_GROWTH`. So the next look is due after `(n_left - n_end) // (MAX_GROWTH + 1)` tokens, and one more.
        """
        n_left = self._max_tokens - len(self._answer)
        if self._max_tokens < 0 or n_left > self._next_look or self._matcher.is_stopped():
            return None
        end = _short_end(self._matcher, self._vocabulary, min(n_left, MAX_END_LENGTH))
        n_end = 0 if end is None else len(end)
        if end:
            self.is_cut = n_end + 2 * MAX_GROWTH >= n_left
        if self.is_cut:
            self._next_look = n_left - 1  # every token of the end is chosen here
            return end[0] if end else self._vocabulary.eos_token
        n_free = (n_left - n_end) // (MAX_GROWTH + 1)
        self._next_look = n_left - 1 - n_free
        return None


def _allowed(matcher: LLMatcher, size: int) -> np.ndarray:
    """Return whether the grammar allows each token next, as booleans `(size,)`."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(bits, count=size, bitorder="little").view(bool)


def _short_end(matcher: LLMatcher, tokenizer: LLTokenizer, max_length: int) -> list[int] | None:
    """Return few tokens after which the grammar allows the answer to end.

    Returns None if more than `max_length` tokens are found, or if the answer is still within thoughts. The tokens are
    not the fewest possible: at each place the first of `CLOSERS` that the grammar allows is taken.
    """
    ahead = matcher.deep_copy()
    tokens: list[int] = []
    quote, in_string, *closers = (
        tokenizer.greedy_tokenize(c)[0] for c in (QUOTE, IN_STRING, *CLOSERS)
    )
    was_in_string = False
    while not ahead.is_accepting():
        new = ahead.compute_ff_tokens()  # the tokens that the grammar forces
        if not new:
            bits = ahead.compute_bitmask()
            is_in_string = _is_allowed(bits, in_string) and _is_allowed(bits, quote)
            if is_in_string and was_in_string:
                return None  # the last quote did not end a string, so this is free text: thoughts
            was_in_string = is_in_string
            candidates = [quote] if is_in_string else closers
            best = next((token for token in candidates if _is_allowed(bits, token)), None)
            if best is None:  # none of them: any token that the grammar allows
                best = int(_allowed(ahead, tokenizer.vocab_size).argmax())
            new = [best]
        tokens += new
        if len(tokens) > max_length or not ahead.consume_tokens(new):
            return None
    return tokens


def _is_allowed(bits: bytes, token: int) -> bool:
    """Return whether a matcher's bitmask allows one token; for few tokens faster than `_allowed`."""
    return bool(bits[token // 8] >> (token % 8) & 1)


def _common_prefix_length(first: list[int], second: list[int]) -> int:
    """Return the number of tokens with which both lists begin."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second))
    return sum(1 for _ in pairs)


def _failure(matcher: LLMatcher) -> Exception:
    """Return the error for a matcher that failed: the format is too complex, or a token was not an allowed one."""
    why = reason_of(matcher)
    if "satisfy the grammar" in why:
        return RuntimeError(f"the answer has left its grammar: {why}")
    return SnapKVError(f"the answer's schema is too complex to be enforced: {why}")
