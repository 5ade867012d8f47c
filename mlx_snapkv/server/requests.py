"""What is served, a request on its way through the engine, and the events that its HTTP handler gets."""

from __future__ import annotations

import itertools
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx

from ..completions.answer import Completion
from ..completions.answer_parser import Reply
from ..completions.body import Body
from ..completions.prompt import Prompt
from ..completions.request import CompletionRequest
from ..completions.token_bytes import token_bytes
from ..engine.report import CompressionReport
from ..planning.footprint import Need


class Loaded(NamedTuple):
    """The one model that is served; clients see its names, of which the first is the one it was loaded by."""

    model: Any
    tokenizer: Any
    names: tuple[str, ...]


class Accepted(NamedTuple):
    """The request can be answered; it waits until it may start."""


class Started(NamedTuple):
    """The prompt is about to be read; `n_cached` of its tokens are known from an earlier request.

    `warnings` are sentences on what of the request is left out.
    """

    n_prompt: int
    n_cached: int
    warnings: list[str]


class Read(NamedTuple):
    """How much of the prompt has been read so far."""

    n_read: int
    n_prompt: int


class Logprob(NamedTuple):
    """A token as text and as its own bytes, and its log-probability."""

    token: str
    logprob: float
    data: bytes


class TokenLogprob(NamedTuple):
    """A token of the answer, and the likeliest possible ones in its place."""

    sampled: Logprob
    top: list[Logprob]

    @classmethod
    def of(cls, response: Any, n_top: int, tokenizer: Any) -> TokenLogprob:
        """Of mlx-lm's response, with the `n_top` likeliest tokens, best first."""
        token, logprobs = response.token, response.logprobs
        best: list[int] = []
        if n_top:
            likeliest = mx.argpartition(-logprobs, kth=n_top - 1)[:n_top]
            best = likeliest[mx.argsort(-logprobs[likeliest])].tolist()  # type: ignore[assignment]
        sampled, *top = [
            Logprob(tokenizer.decode([i]), logprobs[i].item(), token_bytes(tokenizer, i))
            for i in (token, *best)
        ]
        return cls(sampled, [each for each in top if each.logprob > -math.inf])


class Finished(NamedTuple):
    answer: Completion
    report: CompressionReport | None


Event = Accepted | Started | Read | Reply | TokenLogprob | Finished | Exception


@dataclass(eq=False)
class EngineRequest:
    """A request on its way through the engine.

    Attributes:
        put: gives an event to the handler that waits for the answer, from any thread; other ranks have none.
        number: the same on all ranks.
        since: when it came, by `time.perf_counter`.
        cancelled: nobody waits any more.
        prompt: the body in the model's tokens; None until they are known.
        completion_request: what the model is to do, set in the engine's thread.
        need: the memory that its caches will take; None without a limit.
        checkpoints: after how many of the prompt's tokens the caches are kept for other prompts.
        answer: None while it waits.
        full: tokens, and caches with all their entries.
    """

    body: Body
    put: Callable[[Event], None] = lambda event: None
    seed: int = field(default_factory=partial(secrets.randbits, 64))
    number: int = field(default_factory=itertools.count().__next__)
    since: float = field(default_factory=time.perf_counter)
    cancelled: bool = False
    prompt: Prompt | None = None
    completion_request: CompletionRequest = field(init=False)
    need: Need | None = None
    checkpoints: list[int] = field(default_factory=list)
    answer: Completion | None = None
    report: CompressionReport | None = None
    full: tuple[list[int], list[Any]] | None = None

    def __reduce__(self) -> tuple:
        """Pickle what another rank needs to prepare the same request."""
        names = ("body", "seed", "number", "prompt", "checkpoints")
        return partial(EngineRequest, **{name: getattr(self, name) for name in names}), ()
