"""Decide which requests the server accepts, and when each of them may start."""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..batch.memory import RESERVED_ANSWER, Memory
from ..completions.body import Body
from ..completions.fields import NO_LIMIT
from ..completions.request import Bounds, CompletionRequest
from ..models.trained_length import beyond_trained_length, trained_length
from ..planning.entry_sizes import EntrySizes
from ..planning.footprint import Need
from .api_error import ApiError, prompt_too_long
from .log import LoggedOnce
from .metrics import Metrics
from .requests import EngineRequest, Loaded


@dataclass(frozen=True)
class Limits:
    """The server's limits.

    Attributes:
        concurrency: maximum number of requests answered at the same time.
        queue: number of requests to accept on top of `concurrency`. They wait for their turn.
        context: maximum prompt length in tokens. None means no limit.
        kv_bytes: KV memory limit for all requests and the prefix cache, in bytes; see `Memory`.
    """

    concurrency: int = 8
    queue: int = 64
    context: int | None = None
    kv_bytes: int | None = None

    @property
    def max_requests(self) -> int:
        """Return the maximum number of requests, both running and waiting."""
        return self.concurrency + self.queue


class Admission:
    """Enforces the limits, and shrinks the prefix cache to make room for requests.

    Args:
        limits: the user's limits.
        loaded: the served model and its prefix cache.
        options: keyword arguments for `CompressedBatchGenerator`.
        metrics: counts open requests.

    Attributes:
        bounds: the model's maximum answer length and vocabulary size.
        context: context length to report to clients, in tokens. This is the user's limit or, without one, the model's
            trained length, which prompts can exceed. None if there is no limit and the trained length is unknown.
    """

    def __init__(self, limits: Limits, loaded: Loaded, options: dict[str, Any], metrics: Metrics):
        """Determine the model's bounds, and the memory for requests."""
        model = loaded.model
        self._limits = limits
        self._prefixes = loaded.prefixes
        self._open_requests = metrics.open_requests
        self._free_places = threading.Semaphore(limits.max_requests)
        self._model = model
        self.context = limits.context or trained_length(model)
        self.bounds = Bounds.of_model(model)
        self._logged_once = LoggedOnce()
        sizes = EntrySizes(model)
        self._memory = Memory(sizes, options, limits.kv_bytes)
        self._full_cache_memory = Memory(sizes, {}, limits.kv_bytes)

    @contextlib.contextmanager
    def reserve_place(self) -> Iterator[None]:
        """Reserve a place for a request during the `with` block. Can be called from any thread.

        Raises: ApiError: no place is free.
        """
        if not self._free_places.acquire(blocking=False):
            raise ApiError(
                429,
                f"all {self._limits.max_requests} places for requests are taken: try again later",
                code="rate_limit_exceeded",
                headers={"Retry-After": "5"},
            )
        try:
            with self._open_requests.track_inprogress():
                yield
        finally:
            self._free_places.release()

    def require_short_prompt(self, n_prompt: int) -> None:
        """Check a prompt's length.

        Raises: ApiError: the prompt exceeds the limit.
        """
        max_prompt = self._limits.context
        if max_prompt is not None and n_prompt > max_prompt:
            advice = "shorten it, or start the server with a larger --max-context"
            raise prompt_too_long(f"{n_prompt} tokens > {max_prompt} maximum; {advice}")

    def memory_for(self, body: Body) -> Memory:
        """Return the `Memory` for full caches if the body sets `full_cache`, otherwise for the server's options."""
        return self._full_cache_memory if body.full_cache else self._memory

    def memory_need(self, body: Body, request: CompletionRequest) -> Need:
        """Return the memory that a request needs.

        Log a warning if the prompt exceeds the model's trained length.

        Raises:
            NeverFits: the request needs more memory than the limit.
            SnapKVError: the policy does not support the request.
        """
        n_prompt = len(request.prompt)
        warning = beyond_trained_length(self._model, n_prompt)
        if warning is not None:
            self._logged_once.warn(warning)
        n_answer = request.max_tokens
        client_max_tokens = body.max_completion_tokens or body.max_tokens
        client_sets_no_limit = client_max_tokens in (None, NO_LIMIT)
        if client_sets_no_limit:  # most answers end long before the maximum
            n_answer = min(n_answer, RESERVED_ANSWER)
        return self.memory_for(body).need(n_prompt, n_answer)

    def admit(self, request: EngineRequest, running: list[EngineRequest], kv_bytes: int) -> bool:
        """Return whether a request can start now. If so, shrink the prefix cache to make room for it.

        Args:
            request: the request that has waited longest.
            running: requests that are being answered.
            kv_bytes: size of the running requests' caches in bytes.
        """
        if len(running) >= self._limits.concurrency:
            return False
        peak_bytes = self._memory.admit(request.need, running, kv_bytes)
        if peak_bytes is None:  # the request has to wait
            return False
        self.trim_prefixes(peak_bytes)
        return True

    def trim_prefixes(self, kv_bytes: int) -> None:
        """Shrink the prefix cache to the memory that is left when requests use `kv_bytes`."""
        self._prefixes.trim_to(self._memory.limit - kv_bytes)
