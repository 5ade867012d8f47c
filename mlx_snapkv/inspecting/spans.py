"""Which part of a text each of its tokens is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

INCOMPLETE = "\ufffd"  # what a tokeniser makes of bytes that are no character
MOST = 8  # tokens of a character, which has at most four bytes

Span = tuple[int, int]


def token_spans(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, list[Span]]:
    """The text of tokens, and the part of it that each is: `text[start:stop]`, one after the other.

    Tokens that make up a character together have the same span, that of all of them. Each is decoded behind those
    before it, since that may decide about its spaces.
    """
    pieces: list[str] = []
    spans: list[Span] = []
    before = start = 0  # tokens[before:start] are the ones taken last, and `known` what they say
    known = waiting = ""  # and what those from `before` on say that may not be whole yet

    def take(stop: int, text: str) -> None:
        nonlocal before, start, known, waiting
        at = spans[-1][1] if spans else 0
        pieces.append(text[len(known) :])
        spans.extend([(at, at + len(pieces[-1]))] * (stop - start))
        before, start = start, stop
        known, waiting = _decoded(tokenizer, tokens[before:start]), ""

    for stop in range(1, len(tokens) + 1):
        text = _decoded(tokenizer, tokens[before:stop])
        if waiting and len(text) > len(waiting) and text.startswith(waiting):
            take(stop - 1, waiting)  # nothing will make it whole
            text = _decoded(tokenizer, tokens[before:stop])
        if text.endswith(INCOMPLETE) and stop - start < MOST:
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


def _decoded(tokenizer: Any, tokens: Sequence[int]) -> str:
    if not tokens:
        return ""
    return tokenizer.decode(list(tokens), clean_up_tokenization_spaces=False)
