"""A request on its way through the engine, and the events that tell its HTTP handler how it goes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..completions.answer import Answer, Piece
from ..completions.request import Asked
from ..engine.footprint import Need
from ..engine.report import CompressionReport


@dataclass(frozen=True)
class Accepted:
    """A request can be answered, and waits until it may start."""


@dataclass(frozen=True)
class Started:
    """A prompt of `n_prompt` tokens is going to be read, `n_cached` of them known from an earlier request."""

    n_prompt: int
    n_cached: int


@dataclass(frozen=True)
class Counted:
    """The tokens of a prompt that was only to be counted."""

    n_tokens: int


@dataclass(frozen=True)
class Read:
    """Tokens of a prompt read so far."""

    n_read: int
    n_prompt: int


@dataclass(frozen=True)
class TokenLogprob:
    """A token of an answer with its log-probability, and the likeliest ones with theirs; tokens as texts."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, token: int, logprobs: Any, n_top: int, tokenizer: Any) -> TokenLogprob:
        """From the log-probabilities `(vocab_size,)` that the token was chosen by."""
        likely: list[int] = []
        if n_top:
            best = mx.argpartition(-logprobs, kth=n_top - 1)[:n_top]
            likely = best[mx.argsort(-logprobs[best])].tolist()  # type: ignore[assignment]
        text, *texts = [tokenizer.decode([i]) for i in (token, *likely)]
        top = zip(texts, (logprobs[i].item() for i in likely))
        return cls(text, logprobs[token].item(), tuple(top))


@dataclass(frozen=True)
class Finished:
    """The whole answer, and what became of the prompt's cache."""

    answer: Answer
    report: CompressionReport | None


@dataclass(frozen=True)
class Idle:
    """Nothing has come for a while."""


Event = Accepted | Started | Counted | Read | Piece | TokenLogprob | Finished | Idle | Exception
EventQueue = asyncio.Queue[tuple[int, Event]]


class Channel:
    """From the engine's thread to the handler of a request, one of perhaps several that it waits for.

    Attributes:
        is_count: the prompt is only to be counted.
        cancelled: nobody listens any more.
        since: when the request came, by `time.perf_counter`.
    """

    def __init__(self, events: EventQueue, index: int = 0, *, is_count: bool = False):
        self._loop, self._events, self._index = asyncio.get_running_loop(), events, index
        self.is_count, self.cancelled = is_count, False
        self.since = time.perf_counter()

    def put(self, event: Event) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._events.put_nowait, (self._index, event))


@dataclass
class EngineRequest:
    """A request that waits, or is read and answered.

    Attributes:
        top_logprobs: likely tokens to be told with each; None if not even its own log-probability is.
        need: what its caches will take; None without a limit.
        checkpoints: after how many of the prompt's tokens the caches are kept for other prompts.
        number: what several ranks call it.
        answer: None while it waits.
        full: tokens, and caches with all their entries.
    """

    channel: Channel
    asked: Asked
    top_logprobs: int | None
    need: Need | None
    checkpoints: list[int]
    number: int = 0
    answer: Answer | None = None
    report: CompressionReport | None = field(default=None, init=False)
    full: tuple[list[int], list[Any]] | None = field(default=None, init=False)

    @property
    def n_prompt(self) -> int:
        return len(self.asked.prompt)
