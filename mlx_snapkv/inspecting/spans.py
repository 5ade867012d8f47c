"""Which part of a text each of its tokens is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

MOST = 4  # bytes of a character, each of which may be a token of its own
INCOMPLETE = "\ufffd"  # what a tokeniser makes of bytes that are no character

Span = tuple[int, int]


def token_spans(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, list[Span]]:
    """The text of tokens, and the part of it that each is: `text[start:stop]`, one after the other.

    Tokens that make up a character together have the same span, that of all of them. Each is decoded behind those
    before it, since that may decide about its spaces.
    """
    pieces: list[str] = []
    spans: list[Span] = []
    at = before = start = 0  # tokens[before:start] are the ones decoded last
    known = ""
    for stop in range(1, len(tokens) + 1):
        text = _decoded(tokenizer, tokens[before:stop])
        is_whole = not text.endswith(INCOMPLETE)
        if not is_whole and stop - start < MOST and stop < len(tokens):
            continue
        piece = text[len(known) :]
        spans += [(at, at + len(piece))] * (stop - start)
        pieces.append(piece)
        at += len(piece)
        before, start = (start if is_whole else stop), stop
        known = _decoded(tokenizer, tokens[before:start])
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
