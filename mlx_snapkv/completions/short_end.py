"""Find a short end for JSON: a few tokens that complete it as the grammar requires."""

import heapq
import itertools
import string
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer

CLOSERS = '}]",:0'  # characters that lead JSON to its end, in order of preference
QUOTE = '"'
IN_STRING = "~"  # a character that JSON allows only in strings
# Characters that may continue a value or a name. They are tried where the grammar allows none of `CLOSERS`.
CONTINUATIONS = string.ascii_letters + string.digits + "{[-"
MAX_CHOICES = 8  # maximum number of alternatives at one position
MAX_PATHS = 64  # maximum number of paths per search
MAX_STEPS = 4096  # maximum number of tokens per search, over all paths


class FreeText(Exception):
    """The answer is still reasoning, which may take any number of tokens."""


def short_end(matcher: LLMatcher, tokenizer: LLTokenizer, max_length: int) -> list[int] | None:
    """Return a few tokens that complete the answer as the grammar requires.

    At each position, the first of `CLOSERS` that the grammar allows is used. Inside a string, a quote is used instead.
    If the grammar allows none of these characters, up to `MAX_CHOICES` alternatives are tried. The shortest path is
    continued first, so that the search ends even for recursive schemas.

    Returns None if no end of at most `max_length` tokens is found.

    Raises: FreeText: the answer is still reasoning.
    """
    end = _search_end(matcher, tokenizer, max_length, MAX_CHOICES)
    if end is not None:
        return end
    # Many alternatives at a position, as in a string with a `pattern`, can use up all paths. So try only one at each
    # position.
    return _search_end(matcher, tokenizer, max_length, max_choices=1)


def allowed_tokens(matcher: LLMatcher, size: int) -> np.ndarray:
    """Return a bool mask `(size,)` of the tokens that the grammar allows next."""
    bitmask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.unpackbits(bitmask, count=size, bitorder="little").view(bool)


def is_in_string(bitmask: bytes, tokenizer: LLTokenizer) -> bool:
    """Return whether a matcher is inside a string: its bitmask allows both a closing quote and more text."""
    tokens = (_character_token(character, tokenizer) for character in (QUOTE, IN_STRING))
    return all(_is_allowed(bitmask, token) for token in tokens)


@dataclass
class _Path:
    """A candidate for the end: its tokens so far, and a matcher that has consumed them."""

    matcher: LLMatcher
    tokens: list[int]
    was_in_string: bool = False

    def append(self, tokens: list[int]) -> bool:
        """Append tokens, and return whether the grammar allows them."""
        self.tokens += tokens
        return bool(self.matcher.consume_tokens(tokens))


def _search_end(
    matcher: LLMatcher, tokenizer: LLTokenizer, max_length: int, max_choices: int
) -> list[int] | None:
    """Search for an end, shortest path first. Return its tokens, or None if none is found within the limits."""
    numbers = itertools.count()
    # A heap of (length, number, path): shorter paths come first, and ties are in order of creation.
    paths = [(0, next(numbers), _Path(matcher.deep_copy(), []))]
    n_steps = 0
    # Limit the number of paths. With one choice per position there is a single path, so limit its length instead.
    max_rounds = MAX_PATHS if max_choices > 1 else max_length + 1
    for _ in range(max_rounds):
        if not paths or n_steps > MAX_STEPS:
            break
        length_before, number, path = heapq.heappop(paths)
        if path.matcher.is_accepting():
            return path.tokens
        next_tokens = _advance(path, tokenizer, max_length)
        length = len(path.tokens)
        n_steps += length - length_before
        if next_tokens is None:  # a dead end
            continue
        if not next_tokens:  # the answer may end here, but there may be a shorter path
            heapq.heappush(paths, (length, number, path))
            continue
        # More than MAX_CHOICES branches would use up all paths, so follow only the first token.
        has_too_many = len(next_tokens) > MAX_CHOICES
        choices = next_tokens[:1] if has_too_many else next_tokens[:max_choices]
        for token in choices:
            branch = _Path(path.matcher.deep_copy(), [*path.tokens])
            if branch.append([token]):
                heapq.heappush(paths, (length + 1, next(numbers), branch))
    return None


def _advance(path: _Path, tokenizer: LLTokenizer, max_length: int) -> list[int] | None:
    """Advance a path while a token is forced or one of `CLOSERS` is allowed. Return the tokens to try next.

    Returns an empty list if the answer may end after the path, and None if the path gets too long or violates the
    grammar.

    Raises: FreeText: the path is inside reasoning.
    """
    while not path.matcher.is_accepting():
        tokens = path.matcher.compute_ff_tokens()  # the tokens that the grammar forces
        if not tokens:
            bitmask = path.matcher.compute_bitmask()
            tokens = _closer_tokens(path, bitmask, tokenizer)
            if not tokens:
                return _continuations(path.matcher, bitmask, tokenizer)
        is_too_long = len(path.tokens) + len(tokens) > max_length
        if is_too_long or not path.append(tokens):
            return None
    return []


def _closer_tokens(path: _Path, bitmask: bytes, tokenizer: LLTokenizer) -> list[int]:
    """Return a list with the token of one of `CLOSERS`, or an empty list if the bitmask allows none of them.

    Inside a string, the token is a quote. Elsewhere, it is the first of `CLOSERS` that the bitmask allows.

    Raises: FreeText: a quote has not ended the string, so the path is inside reasoning.
    """
    in_string = is_in_string(bitmask, tokenizer)
    if in_string and path.was_in_string:
        raise FreeText
    path.was_in_string = in_string
    closers = QUOTE if in_string else CLOSERS
    return _allowed_character_tokens(bitmask, closers, tokenizer)[:1]


def _continuations(matcher: LLMatcher, bitmask: bytes, tokenizer: LLTokenizer) -> list[int]:
    """Return the allowed tokens for `CONTINUATIONS`, or else only the first allowed token.

    In the middle of a multi-byte character, for example, the grammar forbids `CONTINUATIONS`, because the next token
    must continue that character.
    """
    tokens = _allowed_character_tokens(bitmask, CONTINUATIONS, tokenizer)
    if tokens:
        return tokens
    allowed = allowed_tokens(matcher, tokenizer.vocab_size)
    first_allowed = int(allowed.argmax())
    return [first_allowed]


def _allowed_character_tokens(bitmask: bytes, characters: str, tokenizer: LLTokenizer) -> list[int]:
    """Return the tokens for `characters`, omitting tokens that a matcher's bitmask forbids."""
    tokens = (_character_token(character, tokenizer) for character in characters)
    return [token for token in tokens if _is_allowed(bitmask, token)]


def _character_token(character: str, tokenizer: LLTokenizer) -> int:
    """Return a character's token."""
    first_token, *_ = tokenizer.greedy_tokenize(character)
    return first_token


def _is_allowed(bitmask: bytes, token: int) -> bool:
    """Return whether a matcher's bitmask allows a token. For a few tokens this is faster than `allowed_tokens`."""
    byte_index, bit_index = divmod(token, 8)
    return bool(bitmask[byte_index] >> bit_index & 1)
