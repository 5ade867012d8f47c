"""Answering in the form of an API: whole, or as server-sent events."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect

from ..batch.openai_body import Body
from .channel import Event, Idle
from .exchange import Disconnected, Exchange
from .failures import ApiError, as_api_error, bad_request


class Form(ABC):
    """How an API gives its answers: made for one request, and told all its events."""

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
    def streamed(self, index: int, event: Event, exchange: Exchange) -> Iterator[str]:
        """Server-sent events of an event."""

    @abstractmethod
    def end(self, exchange: Exchange) -> Iterator[str]:
        """Server-sent events to end with."""

    @staticmethod
    @abstractmethod
    def error(error: ApiError) -> dict[str, Any]:
        """The body of a failed request."""

    @abstractmethod
    def streamed_error(self, error: ApiError) -> str:
        """A server-sent event that ends the stream."""


def data(value: Any, event: str | None = None) -> str:
    """One server-sent event."""
    name = "" if event is None else f"event: {event}\n"
    return f"{name}data: {json.dumps(value, ensure_ascii=False)}\n\n"


async def answered(
    request: Request, body: Any, chats: Sequence[Body], form: Callable[[str], Form]
) -> Response:
    """The response to a request, in the form that is made for the model's name.

    Args:
        body: what came; its `model` and `stream` count.
        chats: what is asked, one for each answer.
    """
    engine, settings = request.app.state.engine, request.app.state.settings
    name = body.model if isinstance(body.model, str) else engine.loaded.name
    exchange = Exchange(engine, request, chats, settings.timeout)
    return await respond(exchange, form(name), bool(body.stream))


async def respond(exchange: Exchange, form: Form, stream: bool) -> Response:
    """The response to a request; raises ApiError as long as nothing has been sent."""
    await exchange.begin()
    if stream:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(
            _stream(exchange, form), media_type="text/event-stream", headers=headers
        )
    async for index, event in exchange.events():
        form.take(index, event)
    return JSONResponse(form.whole(exchange))


async def _stream(exchange: Exchange, form: Form) -> AsyncIterator[str]:
    try:
        begun, early = False, []
        async for index, event in exchange.events():
            if not exchange.all_started:
                early.append((index, event))
                if isinstance(event, Idle):
                    yield ": waiting\n\n"
                continue
            if not begun:
                begun = True
                for text in form.begin(exchange):
                    yield text
            for each in (*early, (index, event)):
                for text in form.streamed(*each, exchange):
                    yield text
            early = []
        for text in form.end(exchange):
            yield text
    except Disconnected:
        return
    except Exception as error:
        yield form.streamed_error(told(error))


def told(error: Exception) -> ApiError:
    """What a client is told of what was raised while it was served."""
    if isinstance(error, RecursionError):  # which only what a client has nested can be
        return bad_request("the body is nested too deeply")
    if isinstance(error, ClientDisconnect):  # before its body had come
        return Disconnected()
    return as_api_error(error)
