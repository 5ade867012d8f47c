"""The engine: a thread that reads prompts, decodes answers in a batch, and survives failures."""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, NamedTuple

import mlx.core as mx

from ..completions.body import ChatBody, Defaults
from ..completions.prompt import tokenize
from ..completions.request import completion_request
from ..errors import sentence
from ..models.distributed import from_first_rank, n_ranks, rank
from .admission import Admission, Limits
from .api_error import ApiError
from .checkpoints import Checkpoints
from .log import LoggedOnce, log
from .metrics import Metrics
from .requests import Accepted, EngineRequest, Loaded
from .served_batch import ServedBatch

EXCHANGE_SECONDS = 0.1  # seconds between broadcasts from rank 0 while all ranks are idle


class News(NamedTuple):
    """Updates that rank 0 sends to the other ranks before each step.

    Attributes:
        new_requests: accepted requests, which join the queue.
        cancelled_numbers: the `number` of each cancelled request.
        starts_next: whether to take the first waiting request off the queue and start it. If it is cancelled, it is
            taken off but not started.
        engine_ends: whether the engine stops.
    """

    new_requests: list[EngineRequest]
    cancelled_numbers: set[int]
    starts_next: bool
    engine_ends: bool


class Engine:
    """Answers requests in its own thread, which owns the device.

    If a request fails, only that request ends. If a step of the batch fails, all running requests end, and the engine
    continues with a new batch.

    With several Macs, rank 0 receives the requests. Before every step it shares what only it knows: new requests,
    cancelled requests, whether the next request may start, and whether to stop. If a step fails on one rank, the
    process of that rank exits, and mlx.launch then ends the other processes. Otherwise, the other ranks would keep
    waiting inside the model for the failed one.

    Args:
        load: loads the model. It is called in the engine's thread, because MLX binds arrays to the thread that creates
            them.
        options: keyword arguments for `CompressedBatchGenerator`.
        limits: limits for requests and KV memory.
        defaults: values for fields that a request omits.

    Attributes:
        loaded: the served model and its prefix cache.
        metrics: counts requests and tokens, and reports memory use.
        kv_bytes: size of the running requests' caches after the last step, in bytes.
    """

    kv_bytes = 0

    def __init__(
        self,
        load: Callable[[], Loaded],
        options: dict[str, Any],
        limits: Limits,
        defaults: Defaults,
    ):
        """Start the thread, and wait until it has loaded the model.

        Raises: Exception: `load` failed, or the model does not support the options.
        """
        self.options = options
        self.metrics = Metrics()
        self._load = load
        self.limits = limits
        self._defaults = defaults
        self.loaded: Loaded
        self._model_loaded = Future[None]()  # done when loading has finished or failed
        self._submitted_requests: SimpleQueue[EngineRequest] = SimpleQueue()
        self._wake_event = threading.Event()
        # Hugging Face tokenizers fail if their settings change while another thread uses them.
        self._tokenizer_lock = threading.Lock()
        self._is_stopping = self._must_end = False
        self._waiting_requests: deque[EngineRequest] = deque()
        self._cancelled_numbers: set[int] = set()  # request numbers, the same on all ranks
        self._logged_once = LoggedOnce()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        try:
            self._model_loaded.result()
        except BaseException:
            self.stop()
            raise

    # Methods called by other threads:

    @property
    def context(self) -> int | None:
        """Return the context length to report to clients, in tokens, or None if unknown."""
        return self._admission.context

    @property
    def is_alive(self) -> bool:
        """Return whether the engine accepts requests: its thread is running and has not been told to stop."""
        return not self._is_stopping and self._thread.is_alive()

    def require_alive(self) -> None:
        """Check that the server is not shutting down.

        Raises: ApiError: the server is shutting down.
        """
        if not self.is_alive:
            raise ApiError(503, "the server is shutting down", code="shutting_down")

    @contextlib.contextmanager
    def answering(self, request: EngineRequest) -> Iterator[None]:
        """Reserve a place for a request during the `with` block, and cancel the request at the end.

        Raises: ApiError: too many requests are waiting, or the server is shutting down.
        """
        self.require_alive()
        with self._admission.reserve_place():
            try:
                yield
            finally:
                request.is_cancelled = True

    def submit(self, request: EngineRequest) -> None:
        """Tokenise a request in the caller's thread (this may take seconds), and pass it to the engine's thread.

        Raises:
            SnapKVError: the chat template fails, the prompt is empty, or a token is not in the vocabulary.
            ApiError: the prompt is too long.
        """
        vocabulary_size = self._admission.bounds.vocabulary_size
        with self._tokenizer_lock:
            prompt = tokenize(request.body, self.loaded.tokenizer, vocabulary_size)
            request.prompt = prompt
            self._admission.require_short_prompt(len(prompt.tokens))
            request.checkpoints = self._checkpoints.checkpoint_lengths(request.body, prompt.tokens)
        self._submitted_requests.put(request)
        self._wake_event.set()

    def count_tokens(self, body: ChatBody) -> int:
        """Return the length of a prompt in tokens.

        Raises:
            SnapKVError: the chat template fails, the prompt is empty, or a token is not in the vocabulary.
            ApiError: the server is shutting down.
        """
        self.require_alive()
        with self._tokenizer_lock:
            return len(tokenize(body, self.loaded.tokenizer).tokens)

    def stop(self, seconds: float | None = None) -> None:
        """Stop after the current step, and wait up to `seconds` (by default, indefinitely) for the thread to end."""
        self._is_stopping = True
        self._wake_event.set()
        self._thread.join(seconds)

    def join(self) -> None:
        """Wait until the thread has ended. On ranks other than 0, this happens when rank 0 stops."""
        self._thread.join()

    # Methods called by the engine's thread:

    def _run(self) -> None:
        """Load the model, unblock `__init__`, and answer requests until `stop`."""
        try:
            self.loaded = self._load()
            self._create_parts()
        except BaseException as error:
            mx.clear_streams()  # or MLX's threads may abort the process, which is about to exit
            self._model_loaded.set_exception(error)
            return
        self._model_loaded.set_result(None)
        while not self._must_end:
            try:
                self._run_round()
            except Exception as error:
                self._fail_running(error)
        self.batch.generator.close()

    def _create_parts(self) -> None:
        """Create the objects that depend on the model."""
        self._checkpoints = Checkpoints(self.loaded, self.options)
        self._admission = Admission(self.limits, self.loaded, self.options, self.metrics)
        self._new_batch = partial(
            ServedBatch,
            self.loaded,
            self.options,
            max_requests=self.limits.concurrency,
            checkpoints=self._checkpoints,
            metrics=self.metrics,
            on_pause=self._interrupt_if_stopping,
        )
        self.batch = self._new_batch()
        self.metrics.track(self)

    def _run_round(self) -> None:
        """If idle, wait for a request. Then start requests while there is room, and run one step."""
        is_idle = not self.batch.running and not self._waiting_requests
        if is_idle:
            self._wait_for_request()
        while (request := self._exchange_and_take_next()) is not None:
            if request.number not in self._cancelled_numbers:
                self.batch.start(request)
        if self._must_end:
            return
        self.batch.remove(self._cancelled_numbers)
        to_restart = self.batch.step()
        self._waiting_requests.extendleft(to_restart)
        self.kv_bytes = self.batch.generator.prompt_cache_nbytes
        self._admission.trim_prefixes(self.kv_bytes)

    def _wait_for_request(self) -> None:
        """Wait for a new request or for `stop`.

        With several Macs, each rank returns after at most `EXCHANGE_SECONDS`, and then takes part in a broadcast from
        rank 0. Without the pause, waiting for the broadcast would keep a CPU core busy.
        """
        if rank() != 0:
            time.sleep(EXCHANGE_SECONDS)
            return
        timeout = None if n_ranks() == 1 else EXCHANGE_SECONDS
        self._wake_event.wait(timeout)
        self._wake_event.clear()

    def _exchange_and_take_next(self) -> EngineRequest | None:
        """Broadcast rank 0's updates to all ranks. Return the next request, or None if none may start yet."""
        news = from_first_rank(self._collect_news)
        self._cancelled_numbers = news.cancelled_numbers
        self._must_end = news.engine_ends
        if rank() != 0:  # on rank 0, `_collect_news` has already done this
            for request in news.new_requests:
                self._build_completion_request(request)
            self._waiting_requests.extend(news.new_requests)
        return self._waiting_requests.popleft() if news.starts_next else None

    def _collect_news(self) -> News:
        """Accept new requests, note cancelled ones, and decide whether the next may start. If so, make room for it.

        Called only on rank 0.
        """
        new_requests = list(self._accept_submitted())
        self._waiting_requests.extend(new_requests)
        unfinished = [*self.batch.running.values(), *self._waiting_requests]
        self._cancelled_numbers = {request.number for request in unfinished if request.is_cancelled}
        engine_ends = self._is_stopping
        starts_next = not engine_ends and self._admit_next()
        return News(new_requests, self._cancelled_numbers, starts_next, engine_ends)

    def _accept_submitted(self) -> Iterator[EngineRequest]:
        """Yield submitted requests that can be answered, and fail all others."""
        while not self._submitted_requests.empty():
            request = self._submitted_requests.get()
            try:
                self._build_completion_request(request)
                request.need = self._admission.memory_need(request.body, request.completion_request)
            except Exception as error:
                request.fail(error)
            else:
                request.put(Accepted())
                for warning in request.completion_request.warnings:
                    self._logged_once.warn(f"a request: {warning}")
                yield request

    def _build_completion_request(self, request: EngineRequest) -> None:
        """Set a request's `completion_request`.

        Raises: SnapKVError: the request can't be answered.
        """
        unlimited_request = completion_request(
            request.body,
            self.loaded.tokenizer,
            self._defaults,
            request.seed,
            self._admission.bounds,
            request.prompt,
        )
        memory = self._admission.memory_for(request.body)
        request.completion_request = memory.limit_answer(unlimited_request)

    def _admit_next(self) -> bool:
        """Return whether to take the first waiting request off the queue. If it will start, make room in memory."""
        if not self._waiting_requests:
            return False
        first_waiting = self._waiting_requests[0]
        if first_waiting.number in self._cancelled_numbers:
            return True  # a cancelled request is dropped instead of started, so it needs no memory
        running = list(self.batch.running.values())
        kv_bytes = self.batch.generator.prompt_cache_nbytes
        return self._admission.admit(first_waiting, running, kv_bytes)

    def _interrupt_if_stopping(self, n_read: int, n_to_read: int) -> None:
        """Interrupt a prompt chunk if the server is stopping. The arguments are ignored.

        Raises: ApiError: the server is shutting down.
        """
        # Don't interrupt if there are several ranks: the others would wait inside the model for this one.
        if n_ranks() == 1:
            self.require_alive()

    def _fail_running(self, error: Exception) -> None:
        """End all running requests after a failed step, and create a new batch. With several Macs, exit instead."""
        log.error("a step failed", exc_info=error)
        if n_ranks() > 1:
            # The other ranks are waiting for this one inside the model, so exit at once: mlx.launch then ends them.
            # `_exit` does not flush buffers, so write to stderr directly.
            stderr = 2
            os.write(stderr, f"mlx-snapkv: a step failed: {sentence(error)}\n".encode())
            os._exit(1)
        for request in self.batch.running.values():
            request.fail(error)
        self.batch.generator.close()
        self.batch = self._new_batch()
