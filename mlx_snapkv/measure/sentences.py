"""Map tokens to text, split text into sentences, and rank sentences by their kept entries."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Span = tuple[int, int]  # the characters `text[start:stop]`

INCOMPLETE = "\ufffd"  # text of an incomplete character
MAX_CHARACTER_TOKENS = 8  # a character has at most four bytes in UTF-8

# A sentence or paragraph, including the white space after it.
_SENTENCE_END = re.compile(r".+?(?:[.!?…][\"'”’)\]]*\s+|[。！？]\s*|\n\s*\n\s*|\Z)", re.DOTALL)

# Maximum sentence length in characters. Longer matches are lists, tables or code, and are split into lines.
MAX_SENTENCE = 200

# The start of a list item, table row or heading.
_MARKED_LINE = re.compile(r"(?<=\n)(?=[^\S\n]*[^\w\s\"'“‘(])")

_ROLE = re.compile(r"\s*\w+\n")  # the role that chat templates write after a special token


def token_spans(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, list[Span]]:
    """Decode tokens and return the text and each token's span in it.

    Tokens that together form one character share its span. A token's spaces may depend on the previous token, so tokens
    are decoded with earlier ones as context.
    """
    pieces: list[str] = []
    spans: list[Span] = []
    # tokens[:start] have spans. tokens[previous:start] are decoded again as context, and `known` is their text.
    previous = start = 0
    known = ""
    incomplete = ""  # text from `previous` on, if it ends in the middle of a character

    def decoded(start: int, stop: int) -> str:
        ids = list(tokens[start:stop])
        return tokenizer.decode(ids, clean_up_tokenization_spaces=False) if ids else ""

    def take(stop: int, text: str) -> None:
        """Set the span of tokens[start:stop], given the text of tokens[previous:stop]."""
        nonlocal previous, start, known, incomplete
        piece = text[len(known) :]
        pieces.append(piece)
        piece_start = spans[-1][1] if spans else 0
        spans.extend([(piece_start, piece_start + len(piece))] * (stop - start))
        previous = start
        start = stop
        known = decoded(previous, start)
        incomplete = ""

    for stop in range(1, len(tokens) + 1):
        text = decoded(previous, stop)
        if incomplete and len(text) > len(incomplete) and text.startswith(incomplete):
            # The new token did not complete the character, so the bytes before it are invalid.
            take(stop - 1, incomplete)
            text = decoded(previous, stop)
        if text.endswith(INCOMPLETE) and stop - start < MAX_CHARACTER_TOKENS:
            incomplete = text
        else:
            take(stop, text)
    if incomplete:
        take(len(tokens), incomplete)
    return "".join(pieces), spans


def special_tokens(tokenizer: Any) -> set[int]:
    """Return the ids of special tokens, such as beginning-of-text and the role markers of chat templates."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    marked = {number for number, token in added.items() if getattr(token, "special", False)}
    return marked | set(getattr(tokenizer, "all_special_ids", None) or ())


@dataclass(frozen=True)
class Sentence:
    """A sentence of the prompt.

    Attributes:
        start, stop: token range `[start, stop)` in the prompt.
        kept: share (0 to 1) of the sentence's entries that are kept, over its tokens and all KV heads.
        chosen: the same share, among the entries that the policy chose from; None in the sink and the recent window.
        votes: share of the voters' attention to all chosen entries that this sentence received; None without votes.
    """

    text: str
    start: int
    stop: int
    kept: float
    chosen: float | None
    votes: float | None


def sentences_of(text: str) -> Iterator[str]:
    """Yield a text's sentences with trailing white space. List items, table rows and code lines are separate."""
    for sentence in _SENTENCE_END.findall(text):
        for piece in _MARKED_LINE.split(sentence):
            if len(piece) > MAX_SENTENCE:
                yield from piece.splitlines(keepends=True)
            else:
                yield piece


def rank_sentences(
    text: str, spans: Sequence[Span], special: np.ndarray, counts: np.ndarray, voted: bool
) -> tuple[Sentence, ...]:
    """Rank the sentences that have kept entries: by votes or, without votes, by their share of chosen entries.

    Args:
        text: the prompt's text.
        spans: span of each token in `text`.
        special: bool `(n_tokens,)`, True for special tokens.
        counts: `(5, n_tokens)`. The first four rows count KV heads for each token: heads that keep it, all heads, heads
            that chose it, and heads that could choose it. The last row is the votes of the heads that chose it.
        voted: whether the policy has votes.
    """
    # Column i is the sum over the tokens before token i.
    sums = np.pad(np.cumsum(counts, axis=1), ((0, 0), (1, 0)))
    all_votes = sums[4, -1] or 1
    sentences = []
    for start, stop in _tokens_of_sentences(text, spans, special):
        sentence_counts = sums[:, stop] - sums[:, start]
        n_kept, n_heads, n_chosen, n_choosing, votes = sentence_counts.tolist()
        if n_kept:
            sentence = Sentence(
                text=text[spans[start][0] : spans[stop - 1][1]].strip(),
                start=start,
                stop=stop,
                kept=n_kept / n_heads,
                chosen=n_chosen / n_choosing if n_choosing else None,
                votes=votes / all_votes if voted else None,
            )
            sentences.append(sentence)
    return tuple(
        sorted(sentences, key=lambda s: (-(s.votes or 0), -(s.chosen or 0), -s.kept, s.start))
    )


def _tokens_of_sentences(
    text: str, spans: Sequence[Span], special: np.ndarray
) -> Iterator[tuple[int, int]]:
    """Yield the token range `[start, stop)` of every sentence with a letter or digit, except role names."""
    for is_special, group in itertools.groupby(range(len(spans)), key=lambda i: bool(special[i])):
        if is_special:
            continue
        run = list(group)
        first, last = run[0], run[-1]
        run_text = text[spans[first][0] : spans[last][1]]
        role = _ROLE.match(run_text) if first and special[first - 1] else None
        role_name = "" if role is None else role.group()
        start = first  # the next token
        end = spans[first][0]  # end of the pieces so far, in characters
        pieces = list(sentences_of(run_text[len(role_name) :]))
        if role_name:
            pieces.insert(0, role_name)
        for piece in pieces:
            end += len(piece)
            stop = start
            while stop <= last and spans[stop][1] <= end:
                stop += 1
            if piece != role_name and stop > start and any(map(str.isalnum, piece)):
                yield start, stop
            start = stop
