"""What the thread that generates tells the event loop that serves, request by request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass

from ..batch.answer import Piece
from ..engine.report import CompressionReport


@dataclass(frozen=True)
class Accepted:
    """A request can be answered, and waits for room."""


@dataclass(frozen=True)
class Started:
    """A request's prompt is going to be read.

    Attributes:
        n_prompt: its tokens, `n_cached` of them known from an earlier request.
    """

    n_prompt: int
    n_cached: int


@dataclass(frozen=True)
class Read:
    """Tokens of a prompt read so far."""

    n_read: int
    n_prompt: int


@dataclass(frozen=True)
class Chosen:
    """A token of an answer with its log-probability, and the most likely ones with theirs; tokens as texts."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Finished:
    """An answer's end.

    Attributes:
        reason: "stop", "length" or "tool_calls".
        n_tokens: the end-of-answer token included.
        n_reasoning: those of them that are thoughts.
        stopped_by: the stop text that has ended it.
        report: what became of the prompt's cache.
    """

    reason: str
    n_tokens: int
    n_reasoning: int
    stopped_by: str | None
    report: CompressionReport | None


@dataclass(frozen=True)
class Idle:
    """Nothing has come for a while."""


Event = Accepted | Started | Read | Piece | Chosen | Finished | Idle | Exception
Queued = asyncio.Queue[tuple[int, Event]]


class Channel:
    """From the generating thread to the handler of a request, one of perhaps several that it waits for.

    Attributes:
        cancelled: nobody listens any more.
        since: when the request came, by `time.perf_counter`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, events: Queued, index: int = 0):
        self._loop, self._events, self._index = loop, events, index
        self.cancelled = False
        self.since = time.perf_counter()

    def put(self, event: Event) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._events.put_nowait, (self._index, event))
