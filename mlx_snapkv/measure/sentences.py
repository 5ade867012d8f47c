"""Map tokens to text, split text into sentences, and rank sentences by their kept entries."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Span = tuple[int, int]  # the characters `text[start:stop]`

INCOMPLETE = "\ufffd"  # decoders return this for an incomplete character
# Maximum number of tokens per character. This is more than enough, since a UTF-8 character has at most four bytes.
MAX_CHARACTER_TOKENS = 8

# A sentence or paragraph with its trailing white space, e.g. "(It ended.) ".
_SENTENCE = re.compile(
    r"""
    .+?
    (?:
        [.!?…] ["'”’)\]]* \s+     # the end of a sentence, with closing quotes and brackets
        | [。！？] \s*             # the end of a sentence in Chinese or Japanese
        | \n \s* \n \s*          # an empty line
        | \Z
    )
    """,
    re.DOTALL | re.VERBOSE,
)

# Maximum sentence length in characters. Longer matches are lists, tables or code, and are split into lines.
MAX_SENTENCE = 200

# Matches the start of a list item, table row or heading: a line that begins with a symbol, such as "- item".
_MARKED_LINE = re.compile(
    r"""
    (?<= \n)
    (?=
        [^\S\n]*         # indentation
        [^\w\s"'“‘(]     # a symbol that does not begin a sentence
    )
    """,
    re.VERBOSE,
)

_ROLE = re.compile(r"\s*\w+\n")  # a role name, which chat templates write after a special token


def token_spans(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, list[Span]]:
    """Decode tokens, and return the text and each token's span in the text.

    Tokens that together form one character share its span. A token's leading space can depend on the previous token, so
    tokens are decoded together with earlier tokens.
    """
    pieces: list[str] = []
    spans: list[Span] = []
    # tokens[:start] have spans. tokens[context_start:start] are decoded again as context.
    context_start = start = 0
    context_text = ""
    incomplete_text = ""  # text of tokens[context_start:], if it ends mid-character

    def decode(start: int, stop: int) -> str:
        ids = list(tokens[start:stop])
        return tokenizer.decode(ids, clean_up_tokenization_spaces=False) if ids else ""

    def set_span(stop: int, text: str) -> None:
        """Set the span of tokens[start:stop], given the text of tokens[context_start:stop]."""
        nonlocal context_start, start, context_text, incomplete_text
        piece = text[len(context_text) :]
        pieces.append(piece)
        piece_start = spans[-1][1] if spans else 0
        span = piece_start, piece_start + len(piece)
        spans.extend([span] * (stop - start))
        context_start = start
        start = stop
        context_text = decode(context_start, start)
        incomplete_text = ""

    for stop in range(1, len(tokens) + 1):
        text = decode(context_start, stop)
        is_longer = len(text) > len(incomplete_text) and text.startswith(incomplete_text)
        if incomplete_text and is_longer:
            # The new token did not complete the character, so the bytes before it are invalid.
            set_span(stop - 1, incomplete_text)
            text = decode(context_start, stop)
        may_be_completed = stop - start < MAX_CHARACTER_TOKENS
        if text.endswith(INCOMPLETE) and may_be_completed:
            incomplete_text = text
        else:
            set_span(stop, text)
    if incomplete_text:
        set_span(len(tokens), incomplete_text)
    return "".join(pieces), spans


def special_tokens(tokenizer: Any) -> set[int]:
    """Return the ids of special tokens, such as beginning-of-text and the role markers of chat templates."""
    added_tokens = tokenizer.added_tokens_decoder
    special_ids = {token_id for token_id, token in added_tokens.items() if token.special}
    return special_ids | set(tokenizer.all_special_ids)


@dataclass(frozen=True)
class Sentence:
    """A sentence of the prompt.

    Attributes:
        start, stop: token range `[start, stop)` in the prompt.
        kept: share (0 to 1) of the sentence's entries that are kept, over all KV heads.
        chosen: the same share, not counting entries in the sink and the recent window, which are always kept. None if
            the sentence has no other entries.
        votes: the sentence's share of the votes for all chosen entries. None if the policy has no votes.
    """

    text: str
    start: int
    stop: int
    kept: float
    chosen: float | None
    votes: float | None


def sentences_of(text: str) -> Iterator[str]:
    """Yield a text's sentences with trailing white space.

    List items, table rows and headings are separate sentences. Anything longer than `MAX_SENTENCE` is split into lines.
    """
    for sentence in _SENTENCE.findall(text):
        for piece in _MARKED_LINE.split(sentence):
            if len(piece) > MAX_SENTENCE:
                yield from piece.splitlines(keepends=True)
            else:
                yield piece


def rank_sentences(
    text: str, spans: Sequence[Span], is_special: np.ndarray, counts: np.ndarray, has_votes: bool
) -> tuple[Sentence, ...]:
    """Return the sentences that have kept entries, ranked by `Sentence.votes` or, without votes, by `Sentence.chosen`.

    Args:
        text: the prompt's text.
        spans: span of each token in `text`.
        is_special: bool `(n_tokens,)`, True for special tokens.
        counts: `(5, n_tokens)`. The first four rows count KV heads for each token: heads that keep it, all heads, heads
            that chose it, and heads that could choose it. The last row has the votes of the heads that chose it.
        has_votes: whether the policy has votes.
    """
    # Column i is the sum over the tokens before token i.
    sums = np.pad(np.cumsum(counts, axis=1), ((0, 0), (1, 0)))
    *_, total_votes = sums[:, -1].tolist()
    sentences = []
    for start, stop in _token_ranges_of_sentences(text, spans, is_special):
        sentence_counts = sums[:, stop] - sums[:, start]
        n_kept, n_heads, n_chosen, n_choosing, votes = sentence_counts.tolist()
        if n_kept:
            text_start, text_stop = spans[start][0], spans[stop - 1][1]
            sentence = Sentence(
                text=text[text_start:text_stop].strip(),
                start=start,
                stop=stop,
                kept=n_kept / n_heads,
                chosen=n_chosen / n_choosing if n_choosing else None,
                votes=votes / (total_votes or 1) if has_votes else None,
            )
            sentences.append(sentence)
    sentences.sort(key=_sort_key)
    return tuple(sentences)


def _sort_key(sentence: Sentence) -> tuple[float, float, float, int]:
    """Return the sort key of `rank_sentences`. Ties go to earlier sentences."""
    return -(sentence.votes or 0), -(sentence.chosen or 0), -sentence.kept, sentence.start


def _token_ranges_of_sentences(
    text: str, spans: Sequence[Span], is_special: np.ndarray
) -> Iterator[tuple[int, int]]:
    """Yield the token range `[start, stop)` of every sentence with a letter or digit, except role names."""
    for first, last in _runs_between_special(is_special):
        text_start, text_end = spans[first][0], spans[last][1]
        run_text = text[text_start:text_end]  # the text between special tokens
        follows_special_token = first > 0  # runs are separated by special tokens
        role = _ROLE.match(run_text) if follows_special_token else None
        role_name = "" if role is None else role.group()
        pieces = list(sentences_of(run_text[len(role_name) :]))
        if role_name:
            pieces.insert(0, role_name)
        start = first
        piece_end = text_start
        for piece in pieces:
            piece_end += len(piece)
            stop = start
            # Advance to the first token that ends after the piece.
            while stop <= last and spans[stop][1] <= piece_end:
                stop += 1
            has_words = any(map(str.isalnum, piece))
            if piece != role_name and has_words and stop > start:
                yield start, stop
            start = stop


def _runs_between_special(is_special: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield the first and last index of each run of non-special tokens."""
    all_tokens = range(len(is_special))
    for are_special, group in itertools.groupby(all_tokens, key=lambda i: bool(is_special[i])):
        if not are_special:
            tokens = list(group)
            yield tokens[0], tokens[-1]
