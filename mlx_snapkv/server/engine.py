"""The thread that generates: it takes requests, decodes them together, and outlives whatever fails."""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

from ..completions.body import ChatBody
from ..completions.prompt import tokenised
from ..completions.request import Defaults, completion_request
from ..errors import SnapKVError, sentence
from ..several.ranks import ALONE, Ranks
from .admission import Admission, Limits
from .api_error import ApiError, as_api_error, log
from .logged_once import LoggedOnce
from .metrics import Metrics
from .prefix_cache import Checkpoints, PrefixCache
from .prefix_files import PrefixFiles
from .rank_messages import received, sent
from .requests import Accepted, EngineRequest, Loaded
from .served_batch import ServedBatch


class Engine:
    """Its thread owns the device: it looks for a known prefix, reads and decodes.

    A request that fails ends alone; if a step fails, the requests of that step end, and serving goes on. Of several
    ranks, rank 0 has the clients. Before every step it sends the others what it alone knows: new requests that it
    accepted, requests that were cancelled, whether the next one may start, how many prompts are still kept, and when
    to stop. A step that fails on one rank leaves the others waiting inside the model, and ends the server.

    Args:
        load: gives the model, in the engine's thread, to which MLX binds the arrays.
        options: of the `CompressedBatchGenerator`.
        open_files: gives the folder that prefixes are also kept in, if there is one.

    Attributes:
        kv_bytes: of the requests in the batch, after the last step.
        failure: what ended the server of several ranks, after which uvicorn's `server` must exit.
    """

    kv_bytes = 0
    failure: Exception | None = None
    server: Any = None

    def __init__(
        self,
        load: Callable[[], Loaded],
        options: dict[str, Any],
        prefixes: PrefixCache,
        limits: Limits,
        defaults: Defaults,
        metrics: Metrics,
        open_files: Callable[[Loaded], PrefixFiles | None] = lambda loaded: None,
        ranks: Ranks = ALONE,
    ):
        self.options, self.prefixes, self.metrics = options, prefixes, metrics
        self._load, self._limits, self._defaults = load, limits, defaults
        self._open_files, self._ranks = open_files, ranks
        self._ready = Future[Loaded]()
        self._new: SimpleQueue[EngineRequest] = SimpleQueue()
        self._wake = threading.Event()
        # A tokenizer of Hugging Face's fails if its settings change while another thread is in it.
        self._tokenizing = threading.Lock()
        self._stopping = self._ended = False
        self._waiting: deque[EngineRequest] = deque()
        self._cancelled: set[int] = set()  # their numbers, the same on all ranks
        self._logged_once = LoggedOnce()
        metrics.track(self)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        try:
            self.loaded = self._ready.result()
        except BaseException:
            self.stop()
            raise

    # From other threads.

    @property
    def most_at_once(self) -> int:
        """Requests that are answered or wait at the same time."""
        return self._limits.concurrency + self._limits.queue

    @property
    def is_alive(self) -> bool:
        return not self._stopping and self._thread.is_alive()

    def require_alive(self) -> None:
        """Raises: ApiError: the server is shutting down."""
        if not self.is_alive:
            raise ApiError(503, "the server is shutting down", code="shutting_down")

    @contextlib.contextmanager
    def answering(self, request: EngineRequest) -> Iterator[None]:
        """Hold a place for a request, and answer it once it is submitted, at most until the block ends.

        Raises: ApiError: too many wait.
        """
        self.require_alive()
        with self._admission.place():
            try:
                yield
            finally:
                request.cancelled = True

    def submit(self, request: EngineRequest) -> None:
        """Tokenise a request's body, which may take seconds, in this thread, and leave the rest to the engine's.

        Raises:
            SnapKVError: the chat template refuses, or a token is not one of the vocabulary's.
            ApiError: the prompt is too long.
        """
        with self._tokenizing:
            size = self._admission.bounds.vocabulary
            request.prompt = prompt = tokenised(request.body, self.loaded.tokenizer, size)
        self._admission.require_short(len(prompt.tokens))  # before a grammar is made, for one
        request.checkpoints = self._checkpoints.places(request.body, prompt.tokens)
        self._new.put(request)
        self._wake.set()

    def count(self, body: ChatBody) -> int:
        """The tokens of a prompt."""
        self.require_alive()
        return len(tokenised(body, self.loaded.tokenizer).tokens)

    def stop(self, seconds: float | None = None) -> None:
        """End all requests after the step under way, and wait for that so long."""
        self._stopping = True
        self._wake.set()
        self._thread.join(seconds)

    def join(self) -> None:
        """Wait until the engine has stopped, or rank 0's has; raises what else ended it."""
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    # In its own thread.

    def _run(self) -> None:
        try:
            loaded, limits, options = self._load(), self._limits, self.options
            self.loaded, prefixes, metrics = loaded, self.prefixes, self.metrics
            self._checkpoints = Checkpoints(prefixes, loaded, options)
            self._admission = Admission(limits, loaded.model, options, prefixes, metrics)
            self._new_batch = partial(
                ServedBatch,
                loaded,
                options,
                most=limits.concurrency,
                checkpoints=self._checkpoints,
                metrics=metrics,
                ranks=self._ranks,
                on_pause=self._pause,
            )
            self.batch = self._new_batch()
            prefixes.files = self._open_files(loaded)
        except BaseException as error:
            self._ready.set_exception(error)
            return
        self._ready.set_result(loaded)
        while not self._ended:
            try:
                self._round()
            except Exception as error:
                self._fail_all(error)
        heartbeat = self._ranks.heartbeat
        if self.failure is None and self._ranks.rank:
            heartbeat.call()
        elif self.failure is None:
            with contextlib.suppress(SnapKVError):  # a rank has gone already
                for _ in range(1, self._ranks.size):
                    heartbeat.await_call()  # which each does once it knows
        self.batch.generator.close()

    def _round(self) -> None:
        """Start the requests that may start, and do a step; wait if there is nothing to do."""
        if not (self.batch.running or self._waiting):
            if self._ranks.rank:
                self._ranks.heartbeat.await_call()
            else:
                self._wake.wait()
                self._wake.clear()
                self._ranks.heartbeat.call()
        while (request := self._next_to_start()) is not None:
            if request.number not in self._cancelled:
                self.batch.start(request)
        if self._ended:
            return
        self.batch.remove(self._cancelled)
        self._waiting.extendleft(self.batch.step())
        self.kv_bytes = self.batch.generator.prompt_cache_nbytes
        if self._ranks.rank == 0:  # the others keep as many prefixes
            self._admission.trim_prefixes(self.kv_bytes)

    def _next_to_start(self) -> EngineRequest | None:
        """The next request that rank 0 starts, once all ranks know what it knows."""
        news = self._ranks.first({} if self._ranks.rank else self._news())
        if self._ranks.rank:
            self._waiting.extend(received(message, self._prepare) for message in news["new"])
            self.prefixes.trim_to(n_sequences=news["n_known"])
        self._ended, self._cancelled = news["stops"], set(news["cancelled"])
        return self._waiting.popleft() if news["starts"] else None

    def _news(self) -> dict[str, Any]:
        new = list(self._accepted())
        self._waiting.extend(new)
        under_way = *self.batch.running.values(), *self._waiting
        self._cancelled = {r.number for r in under_way if r.cancelled}
        return {
            "stops": (stops := self._stopping),
            "new": [sent(r) for r in new] if self._ranks.size > 1 else [],
            "cancelled": list(self._cancelled),
            "starts": not stops and self._may_start(),
            "n_known": len(self.prefixes),
        }

    def _accepted(self) -> Iterator[EngineRequest]:
        while not self._new.empty():
            request = self._new.get()
            try:
                self._prepare(request)
                request.need = self._admission.need(request.body, request.completion_request)
            except Exception as error:
                request.put(as_api_error(error))
            else:
                request.put(Accepted())
                for warning in request.completion_request.warnings:
                    self._logged_once.warn(f"a request: {warning}")
                yield request

    def _prepare(self, request: EngineRequest) -> None:
        request.completion_request = completion_request(
            request.body,
            self.loaded.tokenizer,
            self._defaults,
            request.seed,
            self._admission.bounds,
            request.form,
            request.prompt,
        )

    def _may_start(self) -> bool:
        if not self._waiting:
            return False
        request, running = self._waiting[0], list(self.batch.running.values())
        held = self.batch.generator.prompt_cache_nbytes
        cancelled = request.number in self._cancelled
        return cancelled or self._admission.may_start(request, running, held)

    def _pause(self, done: int, total: int) -> None:
        """Leave a chunk that is read when the server stops; of several ranks each reads it to its end."""
        if self._ranks.size == 1:
            self.require_alive()

    def _fail_all(self, error: Exception) -> None:
        """A step failed: end its requests, and continue with a new batch; ranks have diverged, and end."""
        log.error("a step failed", exc_info=error)
        shown = error
        if self._ranks.size > 1:
            self.failure, self._ended = error, True
            shown = ApiError(500, f"the server ends: {sentence(error)}")
            if self.server is not None:
                self.server.should_exit = True
        for request in self.batch.running.values():
            request.put(as_api_error(shown))
        if not self._ended:
            self.batch.generator.close()
            self.batch = self._new_batch()
