"""Where a text's sentences end."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

# Up to the end of a sentence or paragraph, with the white space that follows it.
_PIECE = re.compile(r".+?(?:[.!?…][\"'”’)\]]*\s+|[。！？]\s*|\n\s*\n\s*|\Z)", re.DOTALL)

LONG = 400  # characters; a longer piece is a list, a table or code, and is cut between its lines
LONG_TO_READ = 200  # the same, where sentences are shown

# Before a line of a list, of a table, or a heading.
_MARKED = re.compile(r"(?<=\n)(?=[^\S\n]*[^\w\s\"'“‘(])")


def sentences_of(text: str) -> Iterator[str]:
    """The sentences of a text, with the white space behind them; long lists, tables and code line by line."""
    for piece in _PIECE.findall(text):
        yield from piece.splitlines(keepends=True) if len(piece) > LONG else [piece]


def lines_of(text: str) -> Iterator[str]:
    """Sentences as short as a reader wants them: items of lists, rows of tables and lines of code are their own."""
    for piece in itertools.chain.from_iterable(map(_MARKED.split, sentences_of(text))):
        yield from piece.splitlines(keepends=True) if len(piece) > LONG_TO_READ else [piece]
