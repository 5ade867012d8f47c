"""Requests on their way through the engine, and how many of them there may be."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..batch.answer import Answer
from ..batch.openai_request import Asked
from ..engine.footprint import Need
from ..engine.report import CompressionReport
from .channel import Channel


@dataclass(frozen=True)
class Limits:
    """What the server takes on.

    Attributes:
        concurrency: requests that are answered together.
        queue: requests that may wait besides.
        context: tokens of a prompt, at most; None is no limit.
        kv_bytes: of keys and values that requests take, at most, and what is known of prompts besides; None is no
            limit.
    """

    concurrency: int = 8
    queue: int = 64
    context: int | None = None
    kv_bytes: int | None = None


@dataclass
class Waiting:
    """A request that can be answered, when there is room.

    Attributes:
        top_logprobs: likely tokens to be told with each; None if not even its own probability is.
        need: what its caches will take; None if nobody wants to know.
        cuts: after how many of its prompt's tokens what has been read is to be kept for others.
        number: what several ranks call it.
    """

    channel: Channel
    asked: Asked
    top_logprobs: int | None
    need: Need | None
    cuts: list[int]
    number: int = 0


@dataclass(kw_only=True)
class Running(Waiting):
    """A request that is being read or answered."""

    answer: Answer
    report: CompressionReport | None = None
    recalled: tuple[list[int], list] | None = None  # tokens, and caches with all their entries
    n_prompt: int = field(init=False)

    def __post_init__(self):
        self.n_prompt = len(self.asked.prompt)
