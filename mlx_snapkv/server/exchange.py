"""One HTTP request, from its checked bodies to the response."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.requests import ClientDisconnect

from ..completions.body import Body
from .api_error import ApiError, as_api_error
from .chat_messages import without_volatile_headers
from .formatter import ResponseFormatter
from .requests import Accepted, Channel, Event, EventQueue, Finished, Started

IDLE = 5.0  # seconds without an event before the client gets a sign of life
POLL = 1.0  # seconds between two looks whether the client is still connected


class Exchange:
    """The answers to one HTTP request; those not finished are cancelled when it ends early.

    Args:
        bodies: one for each answer.
    """

    def __init__(self, request: Request, bodies: Sequence[Body]):
        state = request.app.state
        self._engine, self._timeout = state.engine, state.settings.timeout
        self._request, self._bodies = request, bodies
        self._since = self._polled = time.monotonic()
        self._queue: EventQueue = asyncio.Queue()
        self._channels: list[Channel] = []
        self._early: deque[tuple[int, Event]] = deque()

    async def begin(self) -> None:
        """Wait until all prompts are being read, or all are accepted and some must wait for their turn.

        Raises:
            ApiError: one is refused; nothing has been answered then.
        """
        n_accepted = n_started = 0
        try:
            for index, body in enumerate(self._bodies):
                channel = Channel(self._queue, index)
                self._engine.submit(channel, body)
                self._channels.append(channel)
            while n_started < len(self._bodies):
                index, event = await self._next()
                n_accepted += isinstance(event, Accepted)
                n_started += isinstance(event, Started)
                if event is not None:
                    self._early.append((index, event))
                elif n_accepted == len(self._bodies):
                    return
        except BaseException:
            self._cancel()
            raise

    async def events(self) -> AsyncIterator[tuple[int, Event | None]]:
        """The number of an answer and its next event; None when there has been none for a while."""
        n_left, since = len(self._bodies), time.monotonic()
        try:
            while n_left:
                index, event = self._early.popleft() if self._early else await self._next()
                now = time.monotonic()
                if event is None and now - since < IDLE:
                    continue
                since = now
                n_left -= isinstance(event, Finished)
                yield index, event
        finally:
            self._cancel()

    def _cancel(self) -> None:
        for channel in self._channels:
            channel.cancelled = True

    async def _next(self) -> tuple[int, Event | None]:
        """The next event, None if there is none soon; raises what ended a request."""
        now = time.monotonic()
        if now > self._polled + POLL:
            self._polled = now
            if await self._request.is_disconnected():
                raise ClientDisconnect()
            if self._timeout is not None and now > self._since + self._timeout:
                sentence = f"the request was not answered within {self._timeout:g} seconds"
                raise ApiError(408, sentence, kind="timeout_error", code="timeout")
        try:
            index, event = await asyncio.wait_for(self._queue.get(), POLL)
        except asyncio.TimeoutError:
            return 0, None
        if isinstance(event, Exception):
            raise event
        return index, event


async def respond(
    request: Request,
    body: Any,
    chats: Sequence[Body],
    new_formatter: Callable[[str], ResponseFormatter],
) -> Response:
    """The response to a request; raises ApiError as long as nothing has been sent.

    Args:
        body: the client's; its `model` and `stream` count.
        chats: one for each answer.
        new_formatter: makes one for a model's name.
    """
    names = request.app.state.settings.volatile_headers
    exchange = Exchange(request, [without_volatile_headers(chat, names) for chat in chats])
    formatter = new_formatter(body.model or request.app.state.engine.loaded.names[0])
    await exchange.begin()
    if body.stream:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        events = _stream(exchange, formatter)
        return StreamingResponse(events, media_type="text/event-stream", headers=headers)
    async for index, event in exchange.events():
        for _ in formatter.take(index, event):
            pass
    return JSONResponse(formatter.whole())


async def _stream(exchange: Exchange, formatter: ResponseFormatter) -> AsyncIterator[str]:
    try:
        async for index, event in exchange.events():
            for text in formatter.take(index, event):
                yield text
        for text in formatter.end():
            yield text
    except ClientDisconnect:
        return
    except Exception as error:
        yield formatter.stream_error(as_api_error(error))
