"""The served model, requests to the engine, and the events that the engine sends back."""

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
from .api_error import as_api_error
from .prefix_cache import PrefixCache


class Loaded(NamedTuple):
    """The served model and its prefix cache.

    Attributes:
        names: the model's names for clients. The first is the name that the model was loaded under.
    """

    model: Any
    tokenizer: Any
    names: tuple[str, ...]
    prefixes: PrefixCache


class Accepted(NamedTuple):
    """Event: the request is valid and waiting for its turn."""


class Started(NamedTuple):
    """Event: the prompt is about to be read.

    Attributes:
        n_prompt: number of prompt tokens.
        n_cached: number of prompt tokens that came from the prefix cache.
        warnings: sentences about ignored request fields.
    """

    n_prompt: int
    n_cached: int
    warnings: list[str]


class PromptProgress(NamedTuple):
    """Event: `n_read` of `n_prompt` prompt tokens have been read."""

    n_read: int
    n_prompt: int


class Logprob(NamedTuple):
    """A token as text and as bytes, with its log-probability."""

    token: str
    logprob: float
    data: bytes


class TokenLogprob(NamedTuple):
    """Event: an answer token, and the most likely tokens at its position, best first."""

    sampled: Logprob
    top: list[Logprob]

    @classmethod
    def from_response(cls, response: Any, n_top: int, tokenizer: Any) -> TokenLogprob:
        """Create the event from mlx-lm's response.

        `top` gets the `n_top` most likely tokens, or fewer if a constraint allows fewer.
        """
        logprobs = response.logprobs
        top_ids: list[int] = []  # best first
        if n_top > 0:
            unsorted_ids = mx.argpartition(-logprobs, kth=n_top - 1)[:n_top]
            order = mx.argsort(-logprobs[unsorted_ids])
            top_ids = unsorted_ids[order].tolist()  # type: ignore[assignment]

        def with_logprob(token_id: int) -> Logprob:
            return Logprob(
                token=tokenizer.decode([token_id]),
                logprob=logprobs[token_id].item(),
                data=token_bytes(tokenizer, token_id),
            )

        top = [with_logprob(token_id) for token_id in top_ids]
        # Tokens that a constraint forbids have a log-probability of -inf.
        allowed_top = [entry for entry in top if entry.logprob > -math.inf]
        return cls(sampled=with_logprob(response.token), top=allowed_top)


class Finished(NamedTuple):
    """Event: the answer is complete."""

    answer: Completion
    report: CompressionReport | None


Event = Accepted | Started | PromptProgress | Reply | TokenLogprob | Finished | Exception


class StoredPrefix(NamedTuple):
    """Tokens that a request has read, and the resulting caches. Without --prefix-dir, `caches` is empty."""

    tokens: list[int]
    caches: list[Any]


@dataclass(eq=False)
class EngineRequest:
    """A request in the engine.

    Attributes:
        put: sends an event to the HTTP handler that waits for the answer. Can be called from any thread. Does nothing
            on ranks other than 0.
        http_id: id of the HTTP request, for error messages.
        number: identifies the request on all ranks.
        since: time of arrival, from `time.perf_counter`.
        is_cancelled: whether the HTTP handler has stopped waiting for the answer.
        prompt: the prompt. None until it is tokenised.
        completion_request: sampler, processors and limits, set in the engine's thread.
        need: memory that the request's caches will need.
        checkpoints: prompt lengths at which copies of the caches are stored for other prompts.
        answer: the answer so far, set when the request starts.
        report: the compression report. None until the prompt has been read.
        stored_prefix: the prefix that this request has stored. It is stored at the last checkpoint or, if no checkpoint
            is reached, after the prompt or the answer. None until then.
    """

    body: Body
    put: Callable[[Event], None] = lambda event: None
    http_id: str = ""
    seed: int = field(default_factory=partial(secrets.randbits, 64))
    number: int = field(default_factory=itertools.count().__next__)
    since: float = field(default_factory=time.perf_counter)
    is_cancelled: bool = False
    prompt: Prompt | None = None
    completion_request: CompletionRequest = field(init=False)
    need: Need = field(init=False)
    checkpoints: list[int] = field(default_factory=list)
    answer: Completion = field(init=False)
    report: CompressionReport | None = None
    stored_prefix: StoredPrefix | None = None

    def fail(self, error: Exception) -> None:
        """Send the client the error that ended this request."""
        self.put(as_api_error(error, self.http_id))

    def __reduce__(self) -> tuple:
        """Pickle the fields that another rank needs to prepare the same request."""
        names = ("body", "http_id", "seed", "number", "prompt", "checkpoints")
        fields = {name: getattr(self, name) for name in names}
        recreate = partial(EngineRequest, **fields)
        return recreate, ()
