"""One HTTP request's answers, as they come."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from fastapi import Request

from ..batch.openai_body import Body
from .channel import Accepted, Channel, Event, Finished, Idle, Queued, Started
from .engine import Engine
from .failures import ApiError, timed_out

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
        self._until = None if timeout is None else time.monotonic() + timeout
        self._look = time.monotonic() + LOOK
        self._queue: Queued = asyncio.Queue()
        self._channels: list[Channel] = []
        self._early: list[tuple[int, Event]] = []
        self._n_accepted = 0
        self.started: dict[int, Started] = {}
        self.finished: dict[int, Finished] = {}

    async def begin(self) -> None:
        """Wait until all prompts are going to be read, or wait for room that others have.

        Raises:
            ApiError: one is not; nothing has been answered then.
        """
        loop = asyncio.get_running_loop()
        try:
            for index, body in enumerate(self._bodies):
                channel = Channel(loop, self._queue, index)
                self._engine.submit(channel, body)
                self._channels.append(channel)
            while not self.all_started:
                index, event = await self._next()
                if isinstance(event, Idle) and self._n_accepted == len(self._bodies):
                    break
                self._early.append((index, event))
        except BaseException:
            self.end()
            raise

    @property
    def all_started(self) -> bool:
        return len(self.started) == len(self._bodies)

    async def events(self) -> AsyncIterator[tuple[int, Event]]:
        """Which answer, and what came of it; `Idle` when nothing has come for a while."""
        since = time.monotonic()
        try:
            while self._early or len(self.finished) < len(self._bodies):
                index, event = self._early.pop(0) if self._early else await self._next()
                if not isinstance(event, Idle):
                    since = time.monotonic()
                elif time.monotonic() - since < IDLE:
                    continue
                yield index, event
        finally:
            self.end()

    def end(self) -> None:
        """Take what is not finished out of the batch."""
        for channel in self._channels:
            channel.cancelled = True

    async def _next(self) -> tuple[int, Event]:
        """The next event, or `Idle`; raises what ended a request."""
        if time.monotonic() > self._look:
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
        self._look = time.monotonic() + LOOK
        if await self._request.is_disconnected():
            raise Disconnected()
        if self._until is not None and time.monotonic() > self._until:
            raise timed_out(self._timeout or 0)


class Disconnected(ApiError):
    """Nobody is there to be answered."""

    def __init__(self) -> None:
        super().__init__(499, "the client has gone")
