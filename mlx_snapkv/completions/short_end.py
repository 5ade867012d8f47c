"""Find a short end of JSON: a few tokens after which the grammar allows the answer to end."""

import heapq
import itertools
import string
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLMatcher, LLTokenizer

CLOSERS = '}]",:0'  # characters that bring JSON closer to its end, best first
QUOTE = '"'
IN_STRING = "~"  # a character that JSON allows only in strings
# Characters that may continue a value or a name.
CHOICES = string.ascii_letters + string.digits + "{[-"
MAX_CHOICES = 8  # maximum number of alternatives at one place
MAX_PATHS = 64  # maximum number of paths in one search
MAX_STEPS = 4096  # maximum number of tokens of all paths in one search


class FreeText(Exception):
    """The answer is within reasoning, whose end is unknown."""


def short_end(matcher: LLMatcher, tokenizer: LLTokenizer, max_length: int) -> list[int] | None:
    """Return a few tokens after which the grammar allows the answer to end.

    At each place, the first of `CLOSERS` is used that the grammar allows. If it allows none, up to `MAX_CHOICES`
    alternatives are tried, shortest path first, so that a recursive schema comes to an end.

    Returns None if there is no end of at most `max_length` tokens.

    Raises: FreeText: the answer is within reasoning.
    """
    end = _search(matcher, tokenizer, max_length, MAX_CHOICES)
    # A place with many alternatives, such as a pattern, can use up all paths. Then only the first alternatives are
    # tried.
    return _search(matcher, tokenizer, max_length, 1) if end is None else end


def allowed_tokens(matcher: LLMatcher, size: int) -> np.ndarray:
    """Return whether the grammar allows each token next, bool `(size,)`."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(bits, count=size, bitorder="little").view(bool)


def is_in_string(bits: bytes, tokenizer: LLTokenizer) -> bool:
    """Return whether a matcher's bitmask allows both the end of a string and more of it."""
    tokens = (_token(character, tokenizer) for character in (QUOTE, IN_STRING))
    return all(_is_allowed(bits, token) for token in tokens)


@dataclass(order=True)
class _Path:
    """A possible end so far: its tokens, and a matcher that has consumed them. Shorter paths are smaller."""

    length: int
    number: int
    matcher: LLMatcher = field(compare=False)
    tokens: list[int] = field(compare=False)
    was_in_string: bool = field(default=False, compare=False)

    def take(self, tokens: list[int]) -> bool:
        """Append tokens, and return whether the grammar allows them."""
        self.tokens += tokens
        self.length += len(tokens)
        return bool(self.matcher.consume_tokens(tokens))


def _search(
    matcher: LLMatcher, tokenizer: LLTokenizer, max_length: int, max_choices: int
) -> list[int] | None:
    """Follow the shortest path first. Return its tokens when the answer may end; None if all are too long."""
    numbers = itertools.count()
    paths = [_Path(0, next(numbers), matcher.deep_copy(), [])]
    n_steps = 0
    for _ in range(MAX_PATHS if max_choices > 1 else max_length + 1):
        if not paths or n_steps > MAX_STEPS:
            break
        path = heapq.heappop(paths)
        if path.matcher.is_accepting():
            return path.tokens
        n_before = path.length
        choices = _advance(path, tokenizer, max_length)
        n_steps += path.length - n_before
        if choices is None:
            continue
        if not choices:  # the answer may end here, but there may be a shorter path
            heapq.heappush(paths, path)
        for token in choices[:max_choices] if len(choices) <= MAX_CHOICES else choices[:1]:
            ahead = _Path(path.length, next(numbers), path.matcher.deep_copy(), [*path.tokens])
            if ahead.take([token]):
                heapq.heappush(paths, ahead)
    return None


def _advance(path: _Path, tokenizer: LLTokenizer, max_length: int) -> list[int] | None:
    """Advance a path to the next place without a closer, and return the tokens that may follow.

    Returns an empty list if the answer may end there, and None if the path is too long.

    Raises: FreeText: the path is within reasoning.
    """
    while not path.matcher.is_accepting():
        new = path.matcher.compute_ff_tokens()  # the tokens that the grammar forces
        if not new:
            bits = path.matcher.compute_bitmask()
            in_string = is_in_string(bits, tokenizer)
            if in_string and path.was_in_string:
                raise FreeText  # the last quote did not end a string
            path.was_in_string = in_string
            new = _possible(bits, QUOTE if in_string else CLOSERS, tokenizer)[:1]
        if not new:
            choices = _possible(bits, CHOICES, tokenizer)
            # Anything else, such as the rest of a character: use any allowed token.
            any_token = int(allowed_tokens(path.matcher, tokenizer.vocab_size).argmax())
            return choices or [any_token]
        if path.length + len(new) > max_length or not path.take(new):
            return None
    return []


def _possible(bits: bytes, characters: str, tokenizer: LLTokenizer) -> list[int]:
    """Return the tokens of the characters that a matcher's bitmask allows."""
    tokens = (_token(character, tokenizer) for character in characters)
    return [token for token in tokens if _is_allowed(bits, token)]


def _token(character: str, tokenizer: LLTokenizer) -> int:
    """Return the token of a character."""
    first, *_ = tokenizer.greedy_tokenize(character)
    return first


def _is_allowed(bits: bytes, token: int) -> bool:
    """Return whether a matcher's bitmask allows a token. For few tokens this is faster than `allowed_tokens`."""
    return bool(bits[token // 8] >> (token % 8) & 1)
