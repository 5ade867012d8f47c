"""Map tokens to parts of their text, split a text into sentences, and rank sentences by their kept entries."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Span = tuple[int, int]  # the characters `text[start:stop]`

INCOMPLETE = "\ufffd"  # the text of an incomplete character
MAX_CHARACTER_TOKENS = 8  # a character has at most four bytes in UTF-8

# A sentence or paragraph, including the white space after it.
_SENTENCE_END = re.compile(r".+?(?:[.!?…][\"'”’)\]]*\s+|[。！？]\s*|\n\s*\n\s*|\Z)", re.DOTALL)

# Maximum characters of a sentence; longer matches are lists, tables or code, and are split into lines.
MAX_SENTENCE = 200

# The start of a list item, table row or heading.
_MARKED_LINE = re.compile(r"(?<=\n)(?=[^\S\n]*[^\w\s\"'“‘(])")

_ROLE = re.compile(r"\s*\w+\n")  # the role that chat templates write after a special token


def token_spans(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, list[Span]]:
    """Decode tokens, and return the text and the span of each token in it.

    Tokens that form one character together share its span. Because the spaces of a token may depend on the previous
    token, tokens are decoded with earlier ones as context.
    """
    pieces: list[str] = []
    spans: list[Span] = []
    # tokens[:start] have spans. tokens[previous:start] are decoded again as context, and `known` is their text.
    previous = start = 0
    known = ""
    incomplete = ""  # the text from `previous` on, if it ends within a character

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
            # The bytes were invalid, because the new token did not complete them.
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
        start, stop: its tokens `[start, stop)` in the prompt.
        kept: share of its entries that are kept, 0 to 1, over its tokens and all KV heads.
        chosen: this share among the entries that the policy chose from; None in the sink and the recent window.
        votes: its share of the voters' attention to all chosen entries; None without votes.
    """

    text: str
    start: int
    stop: int
    kept: float
    chosen: float | None
    votes: float | None


def sentences_of(text: str) -> Iterator[str]:
    """Yield the sentences of a text with trailing white space. List items, table rows and code lines are separate."""
    for sentence in _SENTENCE_END.findall(text):
        for piece in _MARKED_LINE.split(sentence):
            if len(piece) > MAX_SENTENCE:
                yield from piece.splitlines(keepends=True)
            else:
                yield piece


def rank_sentences(
    text: str, spans: Sequence[Span], special: np.ndarray, counts: np.ndarray, voted: bool
) -> tuple[Sentence, ...]:
    """Rank the sentences with any kept entry, by votes or, without votes, by the heads that chose their entries.

    Args:
        text: the prompt's text.
        spans: spans of the tokens in `text`.
        special: bool `(n_tokens,)`, true for special tokens.
        counts: `(5, n_tokens)`, numbers of KV heads for each token: heads that keep it, all heads, heads that chose it,
            heads that could choose; then the votes of the heads that chose it.
        voted: whether the policy has votes.
    """
    # Sums over the tokens before each token.
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
    """Yield the tokens `[start, stop)` of every sentence with a letter or digit. Role names are left out."""
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
