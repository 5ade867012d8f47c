"""Which part of a text each of its tokens is, its sentences, and a prompt's in order of what is kept of them."""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Span = tuple[int, int]

INCOMPLETE = "\ufffd"  # what a tokeniser makes of bytes that are no character
MAX_CHARACTER_TOKENS = 8  # tokens of a character, which has at most four bytes

# Up to the end of a sentence or paragraph, with the white space that follows it.
_SENTENCE_END = re.compile(r".+?(?:[.!?…][\"'”’)\]]*\s+|[。！？]\s*|\n\s*\n\s*|\Z)", re.DOTALL)

MAX_PIECE = (
    200  # characters; a longer piece is a list, a table or code, and is cut between its lines
)

# Before a line of a list, of a table, or a heading.
_MARKED = re.compile(r"(?<=\n)(?=[^\S\n]*[^\w\s\"'“‘(])")

_ROLE = re.compile(r"\s*\w+\n")  # what templates write behind a mark: whose turn it is


def token_spans(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, list[Span]]:
    """The text of tokens, and the part of it that each is: `text[start:stop]`, one after the other.

    Tokens that make up a character together have the same span, that of all of them. Each is decoded behind those
    before it, since that may decide about its spaces.
    """
    pieces: list[str] = []
    spans: list[Span] = []
    before = start = 0  # tokens[before:start] are the ones taken last, and `known` what they say
    known = waiting = ""  # and what those from `before` on say that may not be whole yet

    def decoded(start: int, stop: int) -> str:
        some = list(tokens[start:stop])
        return tokenizer.decode(some, clean_up_tokenization_spaces=False) if some else ""

    def take(stop: int, text: str) -> None:
        nonlocal before, start, known, waiting
        at = spans[-1][1] if spans else 0
        pieces.append(text[len(known) :])
        spans.extend([(at, at + len(pieces[-1]))] * (stop - start))
        before, start = start, stop
        known, waiting = decoded(before, start), ""

    for stop in range(1, len(tokens) + 1):
        text = decoded(before, stop)
        if waiting and len(text) > len(waiting) and text.startswith(waiting):
            take(stop - 1, waiting)  # nothing will make it whole
            text = decoded(before, stop)
        if text.endswith(INCOMPLETE) and stop - start < MAX_CHARACTER_TOKENS:
            waiting = text
        else:
            take(stop, text)
    if waiting:
        take(len(tokens), waiting)
    return "".join(pieces), spans


def special_tokens(tokenizer: Any) -> set[int]:
    """Ids of the tokens that no text has: a template's marks, beginnings and ends."""
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    marked = {number for number, token in added.items() if getattr(token, "special", False)}
    return marked | set(getattr(tokenizer, "all_special_ids", None) or ())


@dataclass(frozen=True)
class Sentence:
    """A sentence of the prompt.

    Attributes:
        start, stop: its tokens.
        kept: share of its entries that are kept, 0 to 1, over its tokens and all layers' KV heads.
        chosen: the same of the entries that the policy chose among; None if all are among the first or most recent.
        votes: the share of the voters' attention to all entries chosen that went to this sentence's; None if nobody
            votes.
    """

    text: str
    start: int
    stop: int
    kept: float
    chosen: float | None
    votes: float | None


def sentences_of(text: str) -> Iterator[str]:
    """The sentences of a text, with the white space behind them; items of lists, rows and lines of code alone."""
    for piece in itertools.chain.from_iterable(map(_MARKED.split, _SENTENCE_END.findall(text))):
        yield from piece.splitlines(keepends=True) if len(piece) > MAX_PIECE else [piece]


def ranked(
    text: str, spans: Sequence[Span], special: np.ndarray, counts: np.ndarray, voted: bool
) -> tuple[Sentence, ...]:
    """The sentences of which anything is kept: those with most votes first, or else those chosen by most heads.

    Args:
        spans: of the tokens in the text.
        special: bool `(n_tokens,)`, the tokens that are no text.
        counts: `(5, n_tokens)`, of each token: KV heads that keep it, all heads; those that chose it, those that had
            the choice; and the votes for those that chose it.
        voted: somebody votes.
    """
    sums = np.pad(np.cumsum(counts, axis=1), ((0, 0), (1, 0)))
    all_votes = sums[4, -1] or 1
    found = []
    for start, stop in _tokens_of_sentences(text, spans, special):
        kept, heads, chosen, free, votes = (float(x) for x in sums[:, stop] - sums[:, start])
        if kept:
            words = text[spans[start][0] : spans[stop - 1][1]].strip()
            share, part = chosen / free if free else None, votes / all_votes if voted else None
            found.append(Sentence(words, start, stop, kept / heads, share, part))
    return tuple(sorted(found, key=lambda s: (-(s.votes or 0), -(s.chosen or 0), -s.kept, s.start)))


def _tokens_of_sentences(
    text: str, spans: Sequence[Span], special: np.ndarray
) -> Iterator[tuple[int, int]]:
    """First and last tokens `[start, stop)` of every sentence with a letter or digit in it."""
    for is_special, group in itertools.groupby(range(len(spans)), key=lambda i: bool(special[i])):
        if is_special:
            continue
        run = list(group)
        start, at = run[0], spans[run[0]][0]
        words = text[at : spans[run[-1]][1]]
        role = _ROLE.match(words) if start and special[start - 1] else None
        lead = [] if role is None else [role.group()]
        for piece in (*lead, *sentences_of(words[role.end() :] if role else words)):
            at += len(piece)
            stop = start
            while stop <= run[-1] and spans[stop][1] <= at:
                stop += 1
            if piece not in lead and stop > start and any(map(str.isalnum, piece)):
                yield start, stop
            start = stop
