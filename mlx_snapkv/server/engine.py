"""The thread that generates: it takes requests, decodes them together, and outlives whatever fails."""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import mlx.core as mx
from mlx_lm.server import ResponseGenerator
from starlette.requests import ClientDisconnect

from ..batch.generator import CompressedBatchGenerator
from ..batch.groups import request_errors
from ..caches.layers import is_compressed, kv_bytes
from ..completions.answer import Completion
from ..completions.body import Body, ChatBody
from ..completions.request import Defaults, chat_tokens, completion_request
from ..errors import EntryFileError
from .admission import Admission, Limits
from .api_error import as_api_error, log, shutting_down
from .metrics import Metrics
from .prefix_cache import Checkpoints, PrefixCache
from .prefix_files import PrefixFiles
from .requests import Accepted, Channel, EngineRequest, Finished, Loaded, Read, Started

LOOK = 0.1  # seconds between two looks for requests, while nothing is to do


class Engine(ResponseGenerator):
    """mlx-lm's `ResponseGenerator`, with our batches in the place of its own.

    Its thread owns the device: it tokenises, looks for a known prefix, reads and decodes. A request that fails ends
    alone; if a step fails, the requests of that step end, and serving goes on.

    Args:
        load: gives the model, in the engine's thread, to which MLX binds the arrays.
        options: of the `CompressedBatchGenerator`.
        open_files: gives the folder that prefixes are also kept in, if there is one.

    Attributes:
        kv_bytes: of requests that are being read or answered, after the last step.
        failure: what ended the server of several ranks, after which uvicorn's `server` must exit.
    """

    _retries = True
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
    ):
        self.limits, self.defaults, self.metrics = limits, defaults, metrics
        self.prefixes, self.options = prefixes, options
        self._load, self._open_files = load, open_files
        self._ready = Future[Loaded]()
        self._running: dict[int, EngineRequest] = {}
        self._waiting: deque[EngineRequest] = deque()
        self._numbers = itertools.count()
        metrics.track(self)
        super().__init__(None, prefixes)  # type: ignore[arg-type]  # whose model is loaded below
        try:
            self.loaded = self._ready.result()
        except BaseException:
            self.stop_and_join()
            raise

    # From the event loop's thread.

    def submit(self, channel: Channel, body: Body) -> None:
        """Queue a request. Raises: ApiError: too many wait, or the server is shutting down."""
        self._require_alive()
        self._admission.enter()
        channel.on_end = self._admission.leave
        self.requests.put((channel, body))
        if self._stop:  # perhaps after the thread has looked into the queue for the last time
            channel.put(shutting_down())

    def count(self, body: ChatBody) -> int:
        """The tokens of a prompt, from any thread. Raises: ApiError: the server is shutting down."""
        self._require_alive()
        return len(chat_tokens(body, self.loaded.tokenizer, body.template_messages()))

    def _require_alive(self) -> None:
        if self._stop or not self.is_healthy:
            raise shutting_down()

    def stop(self, seconds: float = 0) -> None:
        """End all requests after the step under way, and wait for that so long."""
        self._stop = True
        self._generation_thread.join(seconds)

    # In its own thread.

    def _run_generate(self) -> None:
        try:
            self.loaded = loaded = self._load()
            model, options = loaded.model, self.options
            self.generator = self._new_generator()
            self._checkpoints = Checkpoints(self.prefixes, model, loaded.tokenizer, options)
            self._admission = Admission(self.limits, model, options, self.prefixes, self.metrics)
            self.prefixes.files = self._open_files(loaded)
        except BaseException as error:
            self._ready.set_exception(error)
            return
        self._ready.set_result(loaded)
        while not self._stop:
            try:
                self._generate()
            except Exception as error:
                self._fail_all(error)
        self._end_all()
        self.generator.close()

    def _generate(self) -> None:
        while not self._stop:
            if not (self._running or self._waiting):
                self._wait()
            if self._stop:
                return
            while (request := self._next_to_start()) is not None:
                try:
                    self._start(request)
                except request_errors(self.loaded.model) as error:
                    self._fail(request.channel, error)
            if self._running:
                self._step()

    def _wait(self) -> None:
        with self.requests.not_empty:
            if not self.requests.queue:
                self.requests.not_empty.wait(LOOK)

    def _next_to_start(self) -> EngineRequest | None:
        """The first request that waits, if it may start; new ones are taken before."""
        self._take_requests()
        return self._waiting.popleft() if self._may_start() else None

    def _take_requests(self) -> None:
        while (given := self._next_request()) is not None:
            try:
                self._take(*given)
            except Exception as error:
                self._fail(given[0], error)

    def _may_start(self) -> bool:
        if not self._waiting:
            return False
        request, running = self._waiting[0], list(self._running.values())
        held = self.generator.prompt_cache_nbytes
        return self._is_cancelled(request) or self._admission.may_start(request, running, held)

    def _is_cancelled(self, request: EngineRequest) -> bool:
        return request.channel.cancelled

    def _take(self, channel: Channel, body: Body) -> None:
        seed = secrets.randbits(64)
        asked = completion_request(body, self.loaded.tokenizer, self.defaults, seed)
        asked = self._admission.limited(asked)
        need = self._admission.need(body, asked)
        places = self._checkpoints.places(body, asked.prompt)
        number = next(self._numbers)
        self._waiting.append(EngineRequest(channel, body, seed, asked, need, places, number))
        channel.put(Accepted())

    def _start(self, request: EngineRequest) -> None:
        channel, asked, prompt = request.channel, request.asked, request.asked.prompt
        if self._is_cancelled(request):
            self._fail(channel, ClientDisconnect())
            return
        caches, n_known = self._known(prompt)
        if request.in_full and is_compressed(caches or []):
            caches, n_known = None, 0
        ends = [n for n in request.checkpoints if n > n_known] + [len(prompt)]
        starts = [n_known, *ends]
        (uid,) = self.generator.insert_segments(
            [[prompt[start:end] for start, end in zip(starts, ends)]],
            [asked.max_tokens],
            caches=None if caches is None else [caches],
            all_tokens=[prompt[:n_known]],
            samplers=None if asked.sampler is None else [asked.sampler],
            logits_processors=[asked.processors],
        )
        if request.in_full:
            self.generator.in_full.add(uid)
        request.answer = Completion(asked, self.loaded.tokenizer)
        self._running[uid] = request
        self.metrics.prompt_tokens.inc(len(prompt))
        self.metrics.cached_tokens.inc(n_known)
        self.metrics.prefix_hits.inc(n_known > 0)
        channel.put(Started(len(prompt), n_known))

    def _known(self, prompt: list[int]) -> tuple[list | None, int]:
        return self._checkpoints.fetch(prompt)

    def _step(self) -> None:
        cancelled = [uid for uid, r in self._running.items() if self._is_cancelled(r)]
        if cancelled:
            self.generator.remove(cancelled)
        for uid in cancelled:
            self._fail(self._running.pop(uid).channel, ClientDisconnect())
        read, responses = self.generator.next()
        for progress in read:
            request = self._running[progress.uid]
            n_prompt, (done, total) = len(request.asked.prompt), progress.progress
            n = n_prompt - total + done
            if progress.end_of_segment and n in request.checkpoints:
                caches, tokens = self.generator.extract_cache([progress.uid])[progress.uid]
                self._checkpoints.reached(request, n, tokens, caches)
            request.channel.put(Read(n, n_prompt))
        for response in responses:
            self._deliver(response)
        self.kv_bytes = self.generator.prompt_cache_nbytes
        self._trim_prefixes()

    def _trim_prefixes(self) -> None:
        self._admission.trim_prefixes(self.kv_bytes)

    def _deliver(self, response: Any) -> None:
        request = self._running[response.uid]
        channel, answer = request.channel, request.answer
        assert answer is not None
        if response.finish_reason == "error":
            del self._running[response.uid]
            self._failed(request, response.error)
            return
        request.take(response, self.loaded.tokenizer)
        self.metrics.generated_tokens.inc()
        if answer.n_tokens == 1:
            self.metrics.first_token_seconds.observe(time.perf_counter() - channel.since)
        if answer.finish_reason is None:
            return
        if response.finish_reason is None:  # a stop text ended it
            caches, tokens = self.generator.extract_cache([response.uid])[response.uid]
            self.generator.remove([response.uid])
        else:
            caches, tokens = response.prompt_cache, response.all_tokens
        report = request.report
        if report is not None and not report.compressed:
            report.kv_bytes_before = report.kv_bytes_after = kv_bytes(caches)
        for warning in [] if report is None else report.warnings:
            log.warning("a prompt of %s tokens: %s", len(request.asked.prompt), warning)
        self._checkpoints.answered(request, tokens, caches)
        del self._running[response.uid]
        channel.put(Finished(answer, report))

    def _failed(self, request: EngineRequest, error: Exception) -> None:
        """End a request; let it wait again if a damaged prefix, which is not used again, is all that has failed."""
        assert request.answer is not None
        damaged = error.path if isinstance(error, EntryFileError) else None
        if damaged is not None:
            log.warning("a prefix is not used: %s", error)
            self.prefixes.drop(damaged)
        if damaged is not None and self._retries and not request.answer.n_tokens:
            request.answer = request.report = request.full = None
            self._waiting.appendleft(request)
        else:
            self._fail(request.channel, error)

    def _new_generator(self) -> CompressedBatchGenerator:
        return CompressedBatchGenerator(
            self.loaded.model,
            stop_tokens=[[token] for token in self.loaded.tokenizer.eos_token_ids],
            completion_batch_size=self.limits.concurrency,
            on_report=lambda uid, report: setattr(self._running[uid], "report", report),
            on_recall=lambda uid, *found: self._checkpoints.read(self._running[uid], *found),
            turns=True,
            stream=mx.default_stream(mx.default_device()),
            **self.options,
        )

    def _fail(self, channel: Channel, error: Exception) -> None:
        channel.put(as_api_error(error))

    def _fail_all(self, error: Exception) -> None:
        """A step failed: end its requests, and continue with a new batch."""
        log.error("a step failed", exc_info=error)
        while self._running:
            self._fail(self._running.popitem()[1].channel, error)
        self.generator.close()
        self.generator = self._new_generator()

    def _end_all(self) -> None:
        """The server stops."""
        for request in [*self._running.values(), *self._waiting]:
            request.channel.put(shutting_down())
        while (given := self._next_request()) is not None:
            given[0].put(shutting_down())
