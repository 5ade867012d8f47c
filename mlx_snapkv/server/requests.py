"""What is served, a request on its way through the engine, and the events that its HTTP handler gets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..completions.answer import Completion, Delta
from ..completions.body import Body
from ..completions.request import CompletionRequest
from ..engine.footprint import Need
from ..engine.report import CompressionReport


@dataclass(frozen=True)
class Loaded:
    """The one model that is served; clients see its names, of which the first is the one it was loaded by."""

    model: Any
    tokenizer: Any
    names: tuple[str, ...]


@dataclass(frozen=True)
class Accepted:
    """The request can be answered; it waits until it may start."""


@dataclass(frozen=True)
class Started:
    """The prompt is about to be read; `n_cached` of its tokens are known from an earlier request."""

    n_prompt: int
    n_cached: int


@dataclass(frozen=True)
class Read:
    """How much of the prompt has been read so far."""

    n_read: int
    n_prompt: int


@dataclass(frozen=True)
class TokenLogprob:
    """A token of the answer with its log-probability, and the likeliest tokens with theirs; tokens as text."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, token: int, logprobs: Any, n_top: int, tokenizer: Any) -> TokenLogprob:
        """From the log-probabilities `(vocab_size,)` that the token was sampled from."""
        best: list[int] = []
        if n_top:
            found = mx.argpartition(-logprobs, kth=n_top - 1)[:n_top]
            best = found[mx.argsort(-logprobs[found])].tolist()  # type: ignore[assignment]
        text, *texts = [tokenizer.decode([i]) for i in (token, *best)]
        top = zip(texts, (logprobs[i].item() for i in best))
        return cls(text, logprobs[token].item(), tuple(top))


@dataclass(frozen=True)
class Finished:
    """The whole answer, and what became of the prompt's cache."""

    answer: Completion
    report: CompressionReport | None


Event = Accepted | Started | Read | Delta | TokenLogprob | Finished | Exception
EventQueue = asyncio.Queue[tuple[int, Event]]


class Channel:
    """Carries events from the engine's thread to the handler of a request, which may wait for several.

    Attributes:
        cancelled: nobody listens any more.
        since: when the request came, by `time.perf_counter`.
        on_end: called when it has been answered or failed.
    """

    on_end: Callable[[], None] | None = None

    def __init__(self, events: EventQueue, index: int):
        self._loop, self._events, self._index = asyncio.get_running_loop(), events, index
        self.cancelled, self.since = False, time.perf_counter()

    def put(self, event: Event) -> None:
        """From any thread."""
        if isinstance(event, Finished | Exception) and self.on_end is not None:
            self.on_end()
            self.on_end = None
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            self._loop.call_soon_threadsafe(self._events.put_nowait, (self._index, event))


@dataclass
class EngineRequest:
    """A request that waits, or is read and answered.

    Attributes:
        need: the memory that its caches will take; None without a limit.
        checkpoints: after how many of the prompt's tokens the caches are kept for other prompts.
        number: the request's, the same on all ranks.
        answer: None while it waits.
        full: tokens, and caches with all their entries.
    """

    channel: Channel
    body: Body
    seed: int
    asked: CompletionRequest
    need: Need | None
    checkpoints: list[int]
    number: int
    answer: Completion | None = None
    report: CompressionReport | None = field(default=None, init=False)
    full: tuple[list[int], list[Any]] | None = field(default=None, init=False)

    @property
    def in_full(self) -> bool:
        """Whether it is answered from all entries, whatever the policy."""
        return bool(getattr(self.body, "full_cache", None))

    def take(self, response: Any, tokenizer: Any) -> None:
        """Send on what one of mlx-lm's responses makes certain of the answer."""
        n_top = getattr(self.body, "n_top_logprobs", None)
        if n_top is not None:
            found = response.token, response.logprobs
            self.channel.put(TokenLogprob.of(*found, n_top, tokenizer))
        assert self.answer is not None
        for piece in self.answer.add(response.token, response.finish_reason):
            self.channel.put(piece)
