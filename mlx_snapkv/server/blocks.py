"""An answer as a row of blocks, each of one kind, as Anthropic's messages and OpenAI's responses give it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ..batch.answer import Piece

Kind = Literal["reasoning", "text", "call"]
Change = Literal["start", "add", "end"]


@dataclass
class Block:
    """A part of an answer.

    Attributes:
        text: so far; of a call, its arguments as JSON.
        call: of a tool, in OpenAI's form.
    """

    index: int
    kind: Kind
    text: str = ""
    call: dict[str, Any] | None = None


class Blocks:
    """Makes blocks of pieces; of blocks that would be nothing but white space, none."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._kind: Kind | None = None
        self._blank = ""  # what a block may begin with

    def take(self, piece: Piece) -> Iterator[tuple[Change, Block, str]]:
        """What a piece changes: a block starts, has a text added, or ends."""
        for call in piece.calls:
            yield from self._switch(None)
            block = self._new("call", call)
            yield "start", block, ""
            yield from self._add(block, call["function"]["arguments"])
            yield "end", block, ""
        if not piece.text:
            return
        yield from self._switch("reasoning" if piece.state == "reasoning" else "text")
        text = self._blank + piece.text
        if self._open is None:
            if not text.strip():
                self._blank = text
                return
            assert self._kind is not None
            self._open = self._new(self._kind)
            yield "start", self._open, ""
        self._blank = ""
        yield from self._add(self._open, text)

    def end(self) -> Iterator[tuple[Change, Block, str]]:
        """The answer has ended."""
        yield from self._switch(None)

    def _switch(self, kind: Kind | None) -> Iterator[tuple[Change, Block, str]]:
        if kind == self._kind:
            return
        if self._open is not None:
            yield "end", self._open, ""
        self._open, self._kind, self._blank = None, kind, ""

    def _new(self, kind: Kind, call: dict[str, Any] | None = None) -> Block:
        self.all.append(Block(len(self.all), kind, call=call))
        return self.all[-1]

    def _add(self, block: Block, text: str) -> Iterator[tuple[Change, Block, str]]:
        block.text += text
        yield "add", block, text
