"""The thread that generates: it takes requests in, decodes them together, and outlives whatever fails."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import fields
from typing import Any

import mlx.core as mx
from mlx_lm.server import ResponseGenerator

from ..batch.answer import Answer
from ..batch.generator import CompressedBatchGenerator
from ..batch.openai_body import Body
from ..batch.openai_request import Defaults, asked
from ..engine.report import CompressionReport
from ..errors import EntryFileError
from ..planning.long_prompts import LongPrompts
from .channel import Accepted, Channel, Finished, Read, Started
from .counting import Counted
from .failures import as_api_error, log, shutting_down, too_long
from .likely import chosen, n_likely
from .loaded import Loaded
from .metrics import Metrics
from .open_requests import OpenRequests
from .prefix_files import PrefixFiles
from .prefixes import Prefixes
from .requests import Limits, Running, Waiting
from .reuse import Reuse
from .room import Room


class Engine(ResponseGenerator):
    """mlx-lm's `ResponseGenerator`, with our batches in the place of its own.

    Its thread owns the device: it tokenises, looks for what is known of a prompt, reads and decodes. A request that
    fails ends alone; if a step fails, the requests of that step end, with a number that the log has, and serving
    goes on.

    Args:
        load: gives the model; called in the thread of the engine, to which MLX binds what it makes.
        generation: keywords of `CompressedBatchGenerator`: policy, memory and so on.
        prefixes: what is known of prompts.
        open_files: where that is kept besides, if anywhere.
        limits: what is taken on.
        defaults: for bodies that don't say.
    """

    def __init__(
        self,
        load: Callable[[], Loaded],
        generation: dict[str, Any],
        prefixes: Prefixes,
        limits: Limits,
        defaults: Defaults,
        metrics: Metrics,
        open_files: Callable[[Loaded], PrefixFiles | None] = lambda loaded: None,
    ):
        self.limits, self.defaults, self.metrics = limits, defaults, metrics
        self.prefixes = prefixes
        self.kv_bytes = 0  # of requests that are read or answered, after the last step
        self._load, self._open_files = load, open_files
        self._ready = Future[Loaded]()
        self._options = generation
        self._running: dict[int, Running] = {}
        self._waiting: deque[Waiting] = deque()
        self._open = OpenRequests(limits, metrics)
        metrics.track("requests", lambda: self.kv_bytes)
        metrics.track("prefixes", lambda: prefixes.nbytes)
        metrics.track("prefix_files", lambda: prefixes.file_nbytes)
        super().__init__(None, prefixes)  # type: ignore[arg-type]  # whose model is loaded below
        try:
            self.loaded = self._ready.result()
        except BaseException:
            self.stop_and_join()
            raise

    # From the event loop's thread.

    def submit(self, channel: Channel, body: Body) -> None:
        """Queue a request.

        Raises:
            ApiError: too many wait, or the server is shutting down.
        """
        if self._stop:
            raise shutting_down()
        self._open.enter()
        self.requests.put((channel, body))
        if self._stop:  # perhaps after the thread has looked into the queue for the last time
            channel.put(shutting_down())

    def count(self, body: Body) -> Counted:
        """Have the tokens of a request's prompt counted; no limit counts this request.

        Raises:
            ApiError: the server is shutting down.
        """
        counted = Counted()
        if self._stop or not self.is_healthy:
            raise shutting_down()
        self.requests.put((counted, body))
        if self._stop:  # as in `submit`
            counted.put(shutting_down())
        return counted

    def end_answers(self) -> None:
        """End what is under way: the server is shutting down."""
        self._stop = True

    def await_end(self, seconds: float) -> None:
        """Wait until the step under way is done and all answers are ended, at most so long."""
        self._generation_thread.join(seconds)

    def watched_by(self, server: Any) -> None:
        """Know uvicorn's server, which is to exit should this fail for good: alone it never does."""

    def require_well(self) -> None:
        """Raises: Exception: what has ended the server."""

    # In the thread of its own.

    def _run_generate(self) -> None:
        try:
            self.loaded = self._load()
            self.generator = self._new_generator()
            used = self.prefixes, self.loaded, self._options
            self._reuse, self._room = Reuse(*used), Room(*used, self.limits.kv_bytes)
            self._long = LongPrompts(self.loaded.model, **self._options)
            self.prefixes.files = self._open_files(self.loaded)
        except BaseException as error:
            self._ready.set_exception(error)
            return
        self._ready.set_result(self.loaded)
        while not self._stop:
            try:
                self._generate()
            except Exception as error:
                self._fail_all(error)
        self._end_all(shutting_down())
        self.generator.close()

    def _generate(self) -> None:
        while not self._stop:
            self._take_requests()
            if self._running:
                self._step()

    def _take_requests(self) -> None:
        """Take in what has come; wait for something if there is nothing to do."""
        timeout = None if self._running or self._waiting else 0.1
        while (request := self._next_request(timeout)) is not None:
            channel, body = request
            try:
                self._take(channel, body)
            except Exception as error:
                self._fail(channel, error)
            timeout = None
        while self._waiting and self._has_room(self._waiting[0]):
            waiting = self._waiting.popleft()
            try:
                self._start(waiting)
            except Exception as error:
                self._fail(waiting.channel, error)

    def _has_room(self, waiting: Waiting) -> bool:
        """Whether the next request can be read; what is known of others' prompts gives way to it."""
        if self._is_gone(waiting):
            return True
        if len(self._running) >= self.limits.concurrency:
            return False
        held = self.generator.prompt_cache_nbytes
        return self._room.make(waiting, self._running.values(), held)

    def _is_gone(self, waiting: Waiting) -> bool:
        """Whether nobody waits for the answer any more."""
        return waiting.channel.cancelled

    def _take(self, channel: Any, body: Body, seed: int | None = None) -> None:
        if channel.cancelled:
            if isinstance(channel, Channel):
                self._close()
            return
        wanted = asked(body, self.loaded.tokenizer, self.defaults, seed)
        if isinstance(channel, Counted):
            channel.put(len(wanted.prompt))
            return
        n, most = len(wanted.prompt), self.limits.context
        if most is not None and n > most:
            raise too_long(n, most)
        for said in self._long.warnings(n):
            log.warning(said)
        need, cuts = self._room.need(body, wanted), self._reuse.cuts(body, wanted.prompt)
        self._waiting.append(Waiting(channel, wanted, n_likely(body), need, cuts))
        channel.put(Accepted())

    def _start(self, waiting: Waiting) -> None:
        channel, wanted = waiting.channel, waiting.asked
        if self._is_gone(waiting):
            self._close()
            return
        prompt = wanted.prompt
        caches, n_known = self._known(prompt)
        ends = [n for n in waiting.cuts if n > n_known] + [len(prompt)]
        starts = [n_known, *ends]
        (uid,) = self.generator.insert_segments(
            [[prompt[start:end] for start, end in zip(starts, ends)]],
            [wanted.max_tokens],
            caches=None if caches is None else [caches],
            all_tokens=[prompt[:n_known]],
            samplers=None if wanted.sampler is None else [wanted.sampler],
            logits_processors=[wanted.processors],
        )
        answer = Answer(wanted, self.loaded.tokenizer)
        self._running[uid] = Running(**vars(waiting), answer=answer)
        self.metrics.started(len(prompt), n_known)
        channel.put(Started(len(prompt), n_known))

    def _known(self, prompt: list[int]) -> tuple[list | None, int]:
        """Caches that have read the beginning of a prompt, if there are such, and how many tokens that is."""
        return self._reuse.fetch(prompt)

    def _step(self) -> None:
        self._remove([uid for uid, running in self._running.items() if self._is_gone(running)])
        read, responses = self.generator.next()
        for progress in read:
            running = self._running[progress.uid]
            n = running.n_prompt - progress.progress[1] + progress.progress[0]
            if progress.end_of_segment and n in running.cuts:
                caches, tokens = self.generator.extract_cache([progress.uid])[progress.uid]
                self._reuse.read(running, n, tokens, caches)
            running.channel.put(Read(n, running.n_prompt))
        for response in responses:
            self._deliver(response)
        self.kv_bytes = self.generator.prompt_cache_nbytes
        self._give_way()

    def _give_way(self) -> None:
        self._room.give_way(self.kv_bytes)

    def _deliver(self, response: Any) -> None:
        running = self._running[response.uid]
        channel, answer = running.channel, running.answer
        if response.finish_reason == "error":
            del self._running[response.uid]
            if not (self._is_damage(response.error) and self._ask_again(running)):
                self._fail(channel, response.error)
            return
        if running.top_logprobs is not None:
            channel.put(chosen(response, running.top_logprobs, self.loaded.tokenizer))
        for piece in answer.add(response.token, response.finish_reason):
            channel.put(piece)
        seconds = time.perf_counter() - running.channel.since if answer.n_tokens == 1 else None
        self.metrics.generated(seconds)
        if answer.finish_reason is None:
            return
        if response.finish_reason is None:  # a stop text has ended it
            caches, tokens = self.generator.extract_cache([response.uid])[response.uid]
            self.generator.remove([response.uid])
        else:
            caches, tokens = response.prompt_cache, response.all_tokens
        self._reuse.answered(running, tokens, caches)
        del self._running[response.uid]
        end = answer.finish_reason, answer.n_tokens, answer.n_reasoning, answer.stopped_by
        channel.put(Finished(*end, running.report))
        self._close()

    def _is_damage(self, error: Exception) -> bool:
        """Whether what was known of a prompt is damaged; it then isn't used again."""
        if not isinstance(error, EntryFileError) or error.path is None:
            return False
        log.warning("a prefix is not used: %s", error)
        self.prefixes.drop(error.path)
        return True

    def _ask_again(self, running: Running) -> bool:
        """Let a request wait again, unless some of its answer has been told; whether it does."""
        if running.answer.n_tokens:
            return False
        again = Waiting(**{f.name: getattr(running, f.name) for f in fields(Waiting)})
        self._waiting.appendleft(again)
        return True

    def _new_generator(self) -> CompressedBatchGenerator:
        tokenizer = self.loaded.tokenizer
        return CompressedBatchGenerator(
            self.loaded.model,
            stop_tokens=[[token] for token in tokenizer.eos_token_ids],
            completion_batch_size=self.limits.concurrency,
            on_report=self._reported,
            on_recall=self._recalled,
            turns=True,
            stream=mx.default_stream(mx.default_device()),
            **self._options,
        )

    def _reported(self, uid: int, report: CompressionReport) -> None:
        self._running[uid].report = report

    def _recalled(self, uid: int, caches: list, tokens: list[int]) -> None:
        self._reuse.recalled(self._running[uid], tokens, caches)

    def _remove(self, uids: list[int]) -> None:
        if uids:
            self.generator.remove(uids)
        for uid in uids:
            del self._running[uid]
            self._close()

    def _fail(self, channel: Any, error: Exception) -> None:
        """End a request with what went wrong."""
        channel.put(as_api_error(error))
        if isinstance(channel, Channel):
            self._close()

    def _fail_all(self, error: Exception) -> None:
        """A step has failed: end its requests, and go on with a new batch."""
        log.error("a step failed", exc_info=error)
        running, self._running = self._running, {}
        for request in running.values():
            self._fail(request.channel, error)
        self.generator.close()
        self.generator = self._new_generator()

    def _end_all(self, error: Exception) -> None:
        for request in [*self._running.values(), *self._waiting]:
            self._fail(request.channel, error)
        while (request := self._next_request()) is not None:
            self._fail(request[0], error)

    def _close(self) -> None:
        """A request has ended that clients had opened."""
        self._open.leave()
