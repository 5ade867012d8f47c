"""How many tokens a prompt has, asked of the thread that has the tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future, InvalidStateError

from .failures import timed_out


class Counted:
    """A number to come, or why none does; takes a channel's place in the engine's queue."""

    def __init__(self) -> None:
        self._found: Future[int] = Future()

    @property
    def cancelled(self) -> bool:
        """Nobody waits any more."""
        return self._found.done()

    def put(self, found: int | Exception) -> None:
        """From any thread; only the first counts."""
        with contextlib.suppress(InvalidStateError):
            if isinstance(found, Exception):
                self._found.set_exception(found)
            else:
                self._found.set_result(found)

    async def wait(self, seconds: float) -> int:
        """The number.

        Raises:
            ApiError: the request is wrong, or nothing came for so many seconds.
        """
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._found), seconds)
        except asyncio.TimeoutError:
            raise timed_out(seconds) from None
