"""Answers in the format of an API: whole, or as server-sent events."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ..completions.answer import Delta
from .api_error import ApiError
from .requests import Event, Finished, Read, Started

WAITING = ": waiting\n\n"  # what a stream says until it starts


def server_sent(value: Any, event: str | None = None) -> str:
    """One server-sent event."""
    name = "" if event is None else f"event: {event}\n"
    return f"{name}data: {json.dumps(value, ensure_ascii=False)}\n\n"


class ResponseFormatter(ABC):
    """Formats the answers to one request from their events.

    Attributes:
        started, finished: what those events said, by the answer's number.
    """

    def __init__(self) -> None:
        self.started: dict[int, Started] = {}
        self.finished: dict[int, Finished] = {}

    def take(self, index: int, event: Event | None) -> Iterator[str]:
        """The server-sent events for an event, or for none in a while."""
        if isinstance(event, Started):
            self.started[index] = event
        elif isinstance(event, Finished):
            self.finished[index] = event
        if event is None and not self.started:
            yield WAITING
        else:
            yield from self.stream(index, event)

    @property
    def n_generated(self) -> int:
        """Tokens of all answers."""
        return sum(end.answer.n_tokens for end in self.finished.values())

    @abstractmethod
    def stream(self, index: int, event: Event | None) -> Iterator[str]: ...

    @abstractmethod
    def end(self) -> Iterator[str]:
        """The server-sent events at the end."""

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The response's body, once everything has come."""

    @staticmethod
    @abstractmethod
    def error(error: ApiError) -> dict[str, Any]:
        """The body of a failed request."""

    @abstractmethod
    def stream_error(self, error: ApiError) -> str:
        """The server-sent event that ends a failed stream."""


@dataclass
class Block:
    """A part of an answer, as Anthropic's messages and OpenAI's responses have it.

    Attributes:
        text: so far; for a call, its arguments as JSON.
        call: of a tool, in OpenAI's form.
    """

    index: int
    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    call: dict[str, Any] | None = None


class BlockFormatter(ResponseFormatter):
    """Gives one answer in blocks and streams how they change; no block is only white space.

    Attributes:
        alive: a server-sent event that only shows that the connection lives.
    """

    alive: str

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._kind: Literal["reasoning", "text"] | None = None
        self._blank = ""  # white space that the next block may begin with

    @abstractmethod
    def begin(self) -> Iterator[str]:
        """The server-sent events at the start."""

    @abstractmethod
    def opened(self, block: Block) -> Iterator[str]: ...

    @abstractmethod
    def added(self, block: Block, text: str) -> Iterator[str]: ...

    @abstractmethod
    def closed(self, block: Block) -> Iterator[str]: ...

    def stream(self, index: int, event: Event | None) -> Iterator[str]:
        if isinstance(event, Started):
            yield from self.begin()
        elif event is None or isinstance(event, Read):
            yield self.alive
        elif isinstance(event, Delta):
            for call in event.calls:
                yield from self._switch(None)
                block = self._new("call", call)
                yield from self.opened(block)
                yield from self._add(block, call["function"]["arguments"])
                yield from self.closed(block)
            if event.text:
                yield from self._switch("reasoning" if event.state == "reasoning" else "text")
                yield from self._text(event.text)
        elif isinstance(event, Finished):
            yield from self._switch(None)

    def _text(self, text: str) -> Iterator[str]:
        text, self._blank = self._blank + text, ""
        if self._open is None:
            if not text.strip():
                self._blank = text
                return
            assert self._kind is not None
            self._open = self._new(self._kind)
            yield from self.opened(self._open)
        yield from self._add(self._open, text)

    def _switch(self, kind: Literal["reasoning", "text"] | None) -> Iterator[str]:
        if kind == self._kind:
            return
        if self._open is not None:
            yield from self.closed(self._open)
        self._open, self._kind, self._blank = None, kind, ""

    def _new(self, kind: Literal["reasoning", "text", "call"], call: Any = None) -> Block:
        self.blocks.append(Block(len(self.blocks), kind, call=call))
        return self.blocks[-1]

    def _add(self, block: Block, text: str) -> Iterator[str]:
        block.text += text
        yield from self.added(block, text)
