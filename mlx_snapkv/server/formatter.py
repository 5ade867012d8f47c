"""Answering in the format of an API: whole, or as server-sent events."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from ..completions.answer import Piece
from ..completions.body import Body
from .api_error import ApiError, Disconnected, as_api_error
from .chat_messages import without_volatile_headers
from .exchange import Exchange
from .requests import Event, Finished, Idle, Read


class ResponseFormatter(ABC):
    """Formats the answers of one request, from all its events."""

    @abstractmethod
    def take(self, index: int, event: Event) -> None:
        """Take note of an event of the answer `index`."""

    @abstractmethod
    def whole(self, exchange: Exchange) -> dict[str, Any]:
        """The response's body, when all has come."""

    @abstractmethod
    def begin(self, exchange: Exchange) -> Iterator[str]:
        """Server-sent events to begin with."""

    @abstractmethod
    def stream(self, index: int, event: Event) -> Iterator[str]:
        """Server-sent events of an event."""

    @abstractmethod
    def end(self, exchange: Exchange) -> Iterator[str]:
        """Server-sent events to end with."""

    @staticmethod
    @abstractmethod
    def error(error: ApiError) -> dict[str, Any]:
        """The body of a failed request."""

    @abstractmethod
    def stream_error(self, error: ApiError) -> str:
        """A server-sent event that ends the stream."""


def server_sent(value: Any, event: str | None = None) -> str:
    """One server-sent event."""
    name = "" if event is None else f"event: {event}\n"
    return f"{name}data: {json.dumps(value, ensure_ascii=False)}\n\n"


def exchange_for(request: Request, chats: Sequence[Body], timeout: float | None = None) -> Exchange:
    """What the engine is asked for a request: one chat for each answer, in `timeout` seconds if the server has none."""
    settings = request.app.state.settings
    wanted = [without_volatile_headers(chat, settings.volatile_headers) for chat in chats]
    return Exchange(request.app.state.engine, request, wanted, settings.timeout or timeout)


async def respond(
    request: Request,
    body: Any,
    chats: Sequence[Body],
    new_formatter: Callable[[str], ResponseFormatter],
) -> Response:
    """The response to a request; raises ApiError as long as nothing has been sent.

    Args:
        body: what came; its `model` and `stream` count.
        chats: what is asked, one for each answer.
        new_formatter: makes one for a model's name.
    """
    exchange = exchange_for(request, chats)
    formatter = new_formatter(body.model or request.app.state.engine.loaded.names[0])
    await exchange.begin()
    if body.stream:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        events = _stream(exchange, formatter)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)
    async for index, event in exchange.events():
        formatter.take(index, event)
    return JSONResponse(formatter.whole(exchange))


async def _stream(exchange: Exchange, formatter: ResponseFormatter) -> AsyncIterator[str]:
    begun = False
    try:
        async for index, event in exchange.events():
            if not exchange.all_started:
                yield ": waiting\n\n"
                continue
            if not begun:
                begun = True
                for text in formatter.begin(exchange):
                    yield text
            for text in formatter.stream(index, event):
                yield text
        for text in formatter.end(exchange):
            yield text
    except Disconnected:
        return
    except Exception as error:
        yield formatter.stream_error(as_api_error(error))


@dataclass
class Block:
    """A part of an answer, as Anthropic's messages and OpenAI's responses give it.

    Attributes:
        text: so far; of a call, its arguments as JSON.
        call: of a tool, in OpenAI's form.
    """

    index: int
    kind: Literal["reasoning", "text", "call"]
    text: str = ""
    call: dict[str, Any] | None = None


class BlockFormatter(ResponseFormatter):
    """Gives one answer in blocks, none of which is nothing but white space; they are streamed as they change.

    Attributes:
        blocks: all so far.
        alive: a server-sent event that says nothing but that the connection lives.
    """

    alive: str

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None
        self._kind: Literal["reasoning", "text"] | None = None
        self._blank = ""  # what a block may begin with

    @abstractmethod
    def started(self, block: Block) -> Iterator[str]:
        """Server-sent events of a block that begins."""

    @abstractmethod
    def added(self, block: Block, text: str) -> Iterator[str]:
        """Server-sent events of more text of a block."""

    @abstractmethod
    def ended(self, block: Block) -> Iterator[str]:
        """Server-sent events of a whole block."""

    def take(self, index: int, event: Event) -> None:
        for _ in self.stream(index, event):
            pass

    def stream(self, index: int, event: Event) -> Iterator[str]:
        if isinstance(event, (Idle, Read)):
            yield self.alive
        elif isinstance(event, Piece):
            yield from self._calls(event)
            yield from self._text(event)
        elif isinstance(event, Finished):
            yield from self._switch(None)

    def _calls(self, piece: Piece) -> Iterator[str]:
        for call in piece.calls:
            yield from self._switch(None)
            block = self._new(Block(len(self.blocks), "call", call=call))
            yield from self.started(block)
            yield from self._add(block, call["function"]["arguments"])
            yield from self.ended(block)

    def _text(self, piece: Piece) -> Iterator[str]:
        if not piece.text:
            return
        kind: Literal["reasoning", "text"] = "reasoning" if piece.state == "reasoning" else "text"
        yield from self._switch(kind)
        text = self._blank + piece.text
        if self._open is None:
            if not text.strip():
                self._blank = text
                return
            self._open = self._new(Block(len(self.blocks), kind))
            yield from self.started(self._open)
        self._blank = ""
        yield from self._add(self._open, text)

    def _switch(self, kind: Literal["reasoning", "text"] | None) -> Iterator[str]:
        if kind == self._kind:
            return
        if self._open is not None:
            yield from self.ended(self._open)
        self._open, self._kind, self._blank = None, kind, ""

    def _new(self, block: Block) -> Block:
        self.blocks.append(block)
        return block

    def _add(self, block: Block, text: str) -> Iterator[str]:
        block.text += text
        yield from self.added(block, text)
