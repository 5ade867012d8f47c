"""Which requests are taken on, and when each may start."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..batch.memory import Memory
from ..completions.body import Body
from ..completions.fields import NO_LIMIT
from ..completions.request import Bounds, CompletionRequest
from ..models.counts import vocabulary
from ..models.trained_length import trained_length
from ..planning.footprint import Need
from ..planning.long_prompts import LongPrompts
from .api_error import ApiError, prompt_too_long
from .logged_once import LoggedOnce
from .metrics import Metrics
from .prefix_cache import PrefixCache
from .requests import EngineRequest

# tokens of an answer at most, for a model whose config has no trained length
DEFAULT_MAX_ANSWER = 1 << 20
USUAL_ANSWER = 2048  # tokens that memory is reserved for, if a request does not say


@dataclass(frozen=True)
class Limits:
    """What the server takes on: requests answered together, requests waiting, tokens of a prompt, and the KV memory of
    requests and prefix cache; None is no limit."""

    concurrency: int = 8
    queue: int = 64
    context: int | None = None
    kv_bytes: int | None = None


class Admission:
    """Keeps requests within the limits; the prefix cache shrinks to make room for them."""

    def __init__(
        self,
        limits: Limits,
        model: Any,
        options: dict[str, Any],
        prefixes: PrefixCache,
        metrics: Metrics,
    ):
        self._limits, self._prefixes, self._open = limits, prefixes, metrics.open_requests
        self._places = threading.Semaphore(limits.concurrency + limits.queue)
        self._long = LongPrompts(model, **options)
        self.bounds = Bounds(trained_length(model) or DEFAULT_MAX_ANSWER, vocabulary(model))
        self._logged_once = LoggedOnce()
        self._memory: Memory | None = None
        if limits.kv_bytes is not None:
            self._memory = Memory(model, options, limits.kv_bytes)
            self._in_full = Memory(model, {}, limits.kv_bytes)

    @contextlib.contextmanager
    def place(self) -> Iterator[None]:
        """Counts a request in for the block, from any thread. Raises: ApiError: too many wait."""
        if not self._places.acquire(blocking=False):
            raise ApiError(
                429,
                f"{self._limits.queue} requests are already waiting: try again later",
                code="rate_limit_exceeded",
                headers={"Retry-After": "5"},
            )
        try:
            with self._open.track_inprogress():
                yield
        finally:
            self._places.release()

    def require_short(self, n: int) -> None:
        """Raises: ApiError: a prompt of `n` tokens is longer than any may be."""
        most = self._limits.context
        if most is not None and n > most:
            advice = "shorten it, or start the server with a larger --max-context"
            raise prompt_too_long(f"{n} tokens > {most} maximum; {advice}")

    def need(self, body: Body, request: CompletionRequest) -> Need | None:
        """The memory that a request will take; None without a limit. Raises: NeverFits: it is too long."""
        n = len(request.prompt)
        for warning in self._long.warnings(n):
            self._logged_once.warn(warning)
        if self._memory is None:
            return None
        limit = body.max_completion_tokens or body.max_tokens
        n_answer = (
            request.max_tokens
            if limit not in (None, NO_LIMIT)
            else min(request.max_tokens, USUAL_ANSWER)
        )
        return (self._in_full if body.full_cache else self._memory).need(n, n_answer)

    def may_start(self, request: EngineRequest, running: list[EngineRequest], held: int) -> bool:
        """Whether a request fits beside those running, whose caches hold `held` bytes; if so, prefixes make room."""
        if len(running) >= self._limits.concurrency:
            return False
        if self._memory is not None and request.need is not None:
            taken = self._memory.admit(request.need, running, held)
            if taken is None:
                return False
            self.trim_prefixes(taken)
        return True

    def trim_prefixes(self, held: int) -> None:
        """Trim the prefix cache to what requests leave of the limit."""
        if self._memory is not None:
            self._prefixes.trim_to(n_bytes=self._memory.limit - held)
