"""The requests that are read and answered together."""

import time
from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any

import mlx.core as mx

from ..batch.generator import CompressedBatchGenerator
from ..batch.groups import request_errors
from ..caches.layers import is_compressed, kv_bytes
from ..completions.answer import Completion
from ..errors import EntryFileError, sentence
from .api_error import as_api_error, log
from .metrics import Metrics
from .prefix_cache import Checkpoints
from .requests import EngineRequest, Finished, Loaded, Read, Started, TokenLogprob


class ServedBatch:
    """A `CompressedBatchGenerator` with the requests that it answers, and the prefixes that they take and leave.

    Attributes:
        running: its requests, by the generator's number.
    """

    def __init__(
        self,
        loaded: Loaded,
        options: dict[str, Any],
        most: int,
        checkpoints: Checkpoints,
        metrics: Metrics,
        on_pause: Callable[[int, int], None],
    ):
        self._loaded, self._checkpoints, self._metrics = loaded, checkpoints, metrics
        self.running: dict[int, EngineRequest] = {}
        self.generator = CompressedBatchGenerator(
            loaded.model,
            stop_tokens=[[token] for token in loaded.tokenizer.eos_token_ids],
            completion_batch_size=most,
            on_report=lambda uid, report: setattr(self.running[uid], "report", report),
            on_read=lambda uid, *caches: checkpoints.read(self.running[uid], *caches),
            on_pause=on_pause,
            turns=True,
            stream=mx.default_stream(mx.default_device()),
            **options,
        )

    def start(self, request: EngineRequest) -> None:
        """Take a request in, which gets what goes wrong with it."""
        completion_request = request.completion_request
        prompt, sampler = completion_request.prompt, completion_request.sampler
        in_full = bool(request.body.full_cache)
        caches, n_cached = self._prefix(prompt, in_full)
        if in_full and is_compressed(caches or []):
            caches, n_cached = None, 0
        places = [n_cached, *(n for n in request.checkpoints if n > n_cached), len(prompt)]
        try:
            (uid,) = self.generator.insert_segments(
                [[prompt[start:end] for start, end in pairwise(places)]],
                [completion_request.max_tokens],
                caches=None if caches is None else [caches],
                all_tokens=[prompt[:n_cached]],
                samplers=None if sampler is None else [sampler],
                logits_processors=[completion_request.processors],
                in_full=in_full,
            )
        except request_errors() as error:
            request.put(as_api_error(error))
            return
        request.answer = Completion(completion_request, self._loaded.tokenizer)
        self.running[uid] = request
        self._metrics.prompt_tokens.inc(len(prompt))
        self._metrics.cached_tokens.inc(n_cached)
        self._metrics.prefix_hits.inc(n_cached > 0)
        request.put(Started(len(prompt), n_cached, completion_request.warnings))

    def _prefix(self, prompt: list[int], full_cache: bool) -> tuple[list | None, int]:
        """Return caches that have read a prefix of the prompt, and its length; None and 0 if there are none."""
        try:
            return self._checkpoints.fetch(prompt, full_cache)
        except Exception as error:
            log.warning("a prefix is not used: %s", sentence(error))
            return None, 0

    def remove(self, numbers: Collection[int]) -> None:
        """Drop the requests of these numbers, which nobody waits for."""
        uids = [uid for uid, request in self.running.items() if request.number in numbers]
        for uid in uids:
            if self._checkpoints.may_break_off(request := self.running[uid]):
                read = self.generator.read_so_far(uid)
                if read is not None:  # its client may come again
                    self._checkpoints.broken_off(request, *read)
        if uids:
            self.generator.remove(uids)
        for uid in uids:
            del self.running[uid]

    def step(self) -> list[EngineRequest]:
        """Read or decode on; the requests that have to start again, since a prefix that they took is damaged."""
        if not self.running:
            return []
        read, responses = self.generator.next()
        for progress in read:
            request = self.running[progress.uid]
            n_prompt, (done, total) = len(request.completion_request.prompt), progress.progress
            n = n_prompt - total + done
            if progress.end_of_segment and n in request.checkpoints:
                caches, tokens = self.generator.extract_cache([progress.uid])[progress.uid]
                self._checkpoints.reached(request, n, tokens, caches)
            request.put(Read(n, n_prompt))
        return [r for response in responses if (r := self._deliver(response)) is not None]

    def _deliver(self, response: Any) -> EngineRequest | None:
        """Send on what a response says; the request, if it has to start again."""
        request = self.running[response.uid]
        completion_request, answer = request.completion_request, request.answer
        assert answer is not None
        if response.finish_reason == "error":
            del self.running[response.uid]
            return self._failed(request, response.error)
        if completion_request.n_logprobs is not None:
            request.put(
                TokenLogprob.of(response, completion_request.n_logprobs, self._loaded.tokenizer)
            )
        for piece in answer.add(response.token, response.finish_reason):
            request.put(piece)
        self._metrics.generated_tokens.inc()
        if answer.n_tokens == 1:
            self._metrics.first_token_seconds.observe(time.perf_counter() - request.since)
        if answer.finish_reason is None:
            return None
        if response.finish_reason is None:  # a stop text ended it
            caches, tokens = self.generator.extract_cache([response.uid])[response.uid]
            self.generator.remove([response.uid])
        else:
            caches, tokens = response.prompt_cache, response.all_tokens
        if (report := request.report) is not None:
            if not report.compressed:
                report.kv_bytes_before = report.kv_bytes_after = kv_bytes(caches)
            for warning in report.warnings:
                log.warning("a prompt of %s tokens: %s", len(completion_request.prompt), warning)
        self._checkpoints.answered(request, tokens, caches)
        del self.running[response.uid]
        request.put(Finished(answer, report))
        return None

    def _failed(self, request: EngineRequest, error: Exception) -> EngineRequest | None:
        """End a request, unless a damaged prefix, which is not used again, is all that has failed."""
        if isinstance(error, EntryFileError) and error.path is not None:
            log.warning("a prefix is not used: %s", error)
            self._checkpoints.drop(error.path)
            if request.answer and not request.answer.n_tokens:
                request.answer = request.report = request.full = None
                return request
        request.put(as_api_error(error))
        return None
