"""The thread that generates: it takes requests, decodes them together, and outlives whatever fails."""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

from ..completions.body import ChatBody, Defaults
from ..completions.prompt import tokenize
from ..completions.request import completion_request
from ..errors import sentence
from ..models.distributed import from_first, n_ranks, rank
from .admission import Admission, Limits
from .api_error import ApiError, as_api_error, log
from .logged_once import LoggedOnce
from .metrics import Metrics
from .prefix_cache import Checkpoints, PrefixCache
from .prefix_files import PrefixFiles
from .requests import Accepted, EngineRequest, Loaded
from .served_batch import ServedBatch

EXCHANGE_SECONDS = 0.1  # seconds between two exchanges of ranks that have nothing to do


class Engine:
    """Its thread owns the device: it looks for a known prefix, reads and decodes.

    A request that fails ends alone; if a step fails, the requests of that step end, and serving goes on. Of several
    ranks, rank 0 has the clients. Before every step it shares with the others what it alone knows: new requests that it
    accepted, requests that were cancelled, whether the next one may start, and when to stop. A step that fails on one
    rank ends that process, since the others wait for it inside the model, and mlx.launch then ends these.

    Args:
        load: gives the model, in the engine's thread, to which MLX binds the arrays.
        options: of the `CompressedBatchGenerator`.
        open_files: gives the folder that prefixes are also kept in, if there is one.

    Attributes:
        kv_bytes: of the requests in the batch, after the last step.
    """

    kv_bytes = 0

    def __init__(
        self,
        load: Callable[[], Loaded],
        options: dict[str, Any],
        prefixes: PrefixCache,
        limits: Limits,
        defaults: Defaults,
        metrics: Metrics,
        open_files: Callable[[Loaded], PrefixFiles | None] = lambda loaded: None,
    ):
        self.options, self.prefixes, self.metrics = options, prefixes, metrics
        self._load, self._limits, self._defaults = load, limits, defaults
        self._open_files = open_files
        self._ready = Future[Loaded]()
        self._new: SimpleQueue[EngineRequest] = SimpleQueue()
        self._wake = threading.Event()
        # A tokenizer of Hugging Face's fails if its settings change while another thread is in it.
        self._tokenizing = threading.Lock()
        self._stopping = self._ended = False
        self._waiting: deque[EngineRequest] = deque()
        self._cancelled: set[int] = set()  # their numbers
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
            size = self._admission.bounds.vocabulary_size
            request.prompt = prompt = tokenize(request.body, self.loaded.tokenizer, size)
        self._admission.require_short(len(prompt.tokens))  # before a grammar is made, for one
        request.checkpoints = self._checkpoints.places(request.body, prompt.tokens)
        self._new.put(request)
        self._wake.set()

    def count(self, body: ChatBody) -> int:
        """The tokens of a prompt."""
        self.require_alive()
        return len(tokenize(body, self.loaded.tokenizer).tokens)

    def stop(self, seconds: float | None = None) -> None:
        """End all requests after the step under way, and wait for that so long."""
        self._stopping = True
        self._wake.set()
        self._thread.join(seconds)

    def join(self) -> None:
        """Wait until the engine has stopped, as rank 0 tells the others."""
        self._thread.join()

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
        self.batch.generator.close()

    def _round(self) -> None:
        """Start the requests that may start, and do a step; wait if there is nothing to do."""
        if not (self.batch.running or self._waiting):
            self._wait()
        while (request := self._next_to_start()) is not None:
            if request.number not in self._cancelled:
                self.batch.start(request)
        if self._ended:
            return
        self.batch.remove(self._cancelled)
        self._waiting.extendleft(self.batch.step())
        self.kv_bytes = self.batch.generator.prompt_cache_nbytes
        self._admission.trim_prefixes(self.kv_bytes)

    def _wait(self) -> None:
        """Wait for a request, or for the end.

        Several ranks ask each other now and then: one that waits in a collective would keep a core busy.
        """
        if rank():
            time.sleep(EXCHANGE_SECONDS)
        else:
            self._wake.wait(None if n_ranks() == 1 else EXCHANGE_SECONDS)
            self._wake.clear()

    def _next_to_start(self) -> EngineRequest | None:
        """Return the next request that may start, if there is one, once all ranks know what rank 0 knows."""
        new, self._cancelled, starts, self._ended = from_first(self._news)
        if rank():
            for request in new:
                self._prepare(request)
            self._waiting.extend(new)
        return self._waiting.popleft() if starts else None

    def _news(self) -> tuple[list[EngineRequest], set[int], bool, bool]:
        """Return new requests, the numbers of cancelled ones, whether the next may start, and whether to stop."""
        new = list(self._accepted())
        self._waiting.extend(new)
        under_way = *self.batch.running.values(), *self._waiting
        self._cancelled = {r.number for r in under_way if r.cancelled}
        stops = self._stopping
        return new, self._cancelled, not stops and self._may_start(), stops

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
        if n_ranks() == 1:
            self.require_alive()

    def _fail_all(self, error: Exception) -> None:
        """A step failed: end its requests, and continue with a new batch; one of several ranks ends."""
        log.error("a step failed", exc_info=error)
        if n_ranks() > 1:
            os.write(2, f"mlx-snapkv: a step failed: {sentence(error)}\n".encode())
            os._exit(1)
        for request in self.batch.running.values():
            request.put(as_api_error(error))
        self.batch.generator.close()
        self.batch = self._new_batch()
