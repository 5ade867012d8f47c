"""One HTTP request's answers, as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from fastapi import Request

from ..completions.body import Body
from .api_error import Disconnected, timed_out
from .engine import Engine
from .requests import Accepted, Channel, Counted, Event, EventQueue, Finished, Idle, Started

IDLE = 5.0  # seconds without an event, after which listeners are told so
LOOK = 1.0  # seconds between two looks whether the client is still there


class Exchange:
    """The answers to the bodies of one HTTP request; whatever ends it early takes its requests out of the batch.

    Args:
        bodies: one for each answer.
        timeout: seconds for all of it; None is no limit.

    Attributes:
        started: what is known of each answer's prompt.
        finished: how each answer ended.
    """

    def __init__(
        self, engine: Engine, request: Request, bodies: Sequence[Body], timeout: float | None
    ):
        self._engine, self._request, self._bodies = engine, request, bodies
        self._timeout = timeout
        self._since = self._looked = time.monotonic()
        self._queue: EventQueue = asyncio.Queue()
        self._channels: list[Channel] = []
        self._early: list[tuple[int, Event]] = []
        self._n_accepted = 0
        self.started: dict[int, Started] = {}
        self.finished: dict[int, Finished] = {}

    async def count(self) -> int:
        """The tokens of the first body's prompt, which is not read; raises ApiError."""
        try:
            self._submit(self._bodies[0], is_count=True)
            while True:
                _, event = await self._next()
                if isinstance(event, Counted):
                    return event.n_tokens
        finally:
            self.end()

    async def begin(self) -> None:
        """Wait until all prompts are going to be read, or wait until they may start.

        Raises:
            ApiError: one is not; nothing has been answered then.
        """
        try:
            for body in self._bodies:
                self._submit(body)
            while not self.all_started:
                index, event = await self._next()
                if isinstance(event, Idle):
                    if self._n_accepted == len(self._bodies):
                        return
                    continue
                self._early.append((index, event))
        except BaseException:
            self.end()
            raise

    @property
    def all_started(self) -> bool:
        return len(self.started) == len(self._bodies)

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Which answer, and what came of it; `Idle` when nothing has come for a while, and nothing else before all
        have started."""
        since = time.monotonic()
        try:
            while self._early or len(self.finished) < len(self._bodies):
                if self._early and self.all_started:
                    yield self._early.pop(0)
                    continue
                index, event = await self._next()
                if not isinstance(event, Idle):
                    since = time.monotonic()
                    self._early.append((index, event))
                elif time.monotonic() - since >= IDLE:
                    yield index, event
        finally:
            self.end()

    def end(self) -> None:
        """Take what is not finished out of the batch."""
        for channel in self._channels:
            channel.cancelled = True

    def _submit(self, body: Body, is_count: bool = False) -> None:
        channel = Channel(self._queue, len(self._channels), is_count=is_count)
        self._engine.submit(channel, body)
        self._channels.append(channel)

    async def _next(self) -> tuple[int, Event]:
        """The next event, or `Idle`; raises what ended a request."""
        if time.monotonic() > self._looked + LOOK:
            await self._require_wanted()
        try:
            index, event = await asyncio.wait_for(self._queue.get(), LOOK)
        except asyncio.TimeoutError:
            return 0, Idle()
        if isinstance(event, Exception):
            raise event
        self._n_accepted += isinstance(event, Accepted)
        if isinstance(event, Started):
            self.started[index] = event
        if isinstance(event, Finished):
            self.finished[index] = event
        return index, event

    async def _require_wanted(self) -> None:
        """Raises: ApiError: nobody is there any more, or it has taken too long."""
        self._looked = time.monotonic()
        if await self._request.is_disconnected():
            raise Disconnected()
        if self._timeout is not None and self._looked > self._since + self._timeout:
            raise timed_out(self._timeout)
