"""The batch of requests that are being answered."""

import time
from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any

import mlx.core as mx

from ..batch.generator import CompressedBatchGenerator
from ..batch.groups import request_errors
from ..caches.layers import kv_bytes
from ..completions.answer import Completion
from ..engine.report import CompressionReport
from ..errors import EntryFileError, sentence
from .checkpoints import Checkpoints
from .log import log
from .metrics import Metrics
from .requests import EngineRequest, Finished, Loaded, PromptProgress, Started, TokenLogprob


class ServedBatch:
    """A `CompressedBatchGenerator` together with its requests, their events and their checkpoints.

    Args:
        loaded: the served model.
        options: keyword arguments for the generator.
        max_requests: maximum number of requests that decode together.
        checkpoints: stores the requests' caches in the prefix cache.
        metrics: counts tokens, and measures the time to the first token.
        on_pause: see `CompressedBatchGenerator`.

    Attributes:
        running: requests by their `uid` in the generator.
        generator: the `CompressedBatchGenerator`.
    """

    def __init__(
        self,
        loaded: Loaded,
        options: dict[str, Any],
        max_requests: int,
        checkpoints: Checkpoints,
        metrics: Metrics,
        on_pause: Callable[[int, int], None],
    ):
        """Create the generator."""
        self._loaded = loaded
        self._checkpoints = checkpoints
        self._metrics = metrics
        self.running: dict[int, EngineRequest] = {}
        self.generator = CompressedBatchGenerator(
            loaded.model,
            stop_tokens=[[token] for token in loaded.tokenizer.eos_token_ids],
            completion_batch_size=max_requests,
            on_report=self._set_report,
            on_read=self._store_prompt,
            on_pause=on_pause,
            turns=True,
            stream=mx.default_stream(mx.default_device()),
            **options,
        )

    def _set_report(self, uid: int, report: CompressionReport) -> None:
        self.running[uid].report = report

    def _store_prompt(self, uid: int, caches: list, tokens: list[int]) -> None:
        self._checkpoints.insert_prompt(self.running[uid], tokens, caches)

    def start(self, request: EngineRequest) -> None:
        """Add a request to the batch. On failure, send the error to its client."""
        completion_request = request.completion_request
        prompt = completion_request.prompt
        caches, n_cached = self._fetch_prefix(request)
        # The generator reports the end of each segment, so split the prompt at the checkpoints.
        checkpoints = [length for length in request.checkpoints if length > n_cached]
        segment_bounds = [n_cached, *checkpoints, len(prompt)]
        segments = [prompt[start:end] for start, end in pairwise(segment_bounds)]
        try:
            (uid,) = self.generator.insert_segments(
                [segments],
                [completion_request.max_tokens],
                caches=[caches],
                all_tokens=[prompt[:n_cached]],
                samplers=[completion_request.sampler],
                logits_processors=[completion_request.processors],
                in_full=bool(request.body.full_cache),
            )
        except request_errors() as error:
            request.fail(error)
            return
        request.answer = Completion(completion_request, self._loaded.tokenizer)
        self.running[uid] = request
        self._metrics.prompt_tokens.inc(len(prompt))
        self._metrics.cached_tokens.inc(n_cached)
        self._metrics.prefix_hits.inc(n_cached > 0)
        request.put(Started(len(prompt), n_cached, completion_request.warnings))

    def _fetch_prefix(self, request: EngineRequest) -> tuple[list, int]:
        """Call `Checkpoints.fetch`. If it fails, log a warning and return `([], 0)`."""
        try:
            return self._checkpoints.fetch(request)
        except Exception as error:
            log.warning("a prefix is not used: %s", sentence(error))
            return [], 0

    def remove(self, numbers: Collection[int]) -> None:
        """Remove the cancelled requests with the given numbers.

        If `Checkpoints` allows it, store the caches of prompts that were still being read, so that a retry can continue
        from them.
        """
        uids = [uid for uid, request in self.running.items() if request.number in numbers]
        for uid in uids:
            request = self.running.pop(uid)
            if self._checkpoints.stores_cancelled(request):
                caches_and_tokens = self.generator.read_so_far(uid)
                if caches_and_tokens is not None:
                    caches, tokens = caches_and_tokens
                    self._checkpoints.insert_cancelled(request, tokens, caches)
        if uids:
            self.generator.remove(uids)

    def step(self) -> list[EngineRequest]:
        """Decode a token of each answer, read a prompt chunk, and send the resulting events to the clients.

        Returns: requests that must be restarted because their cached prefix is damaged.
        """
        if not self.running:
            return []
        prompt_responses, token_responses = self.generator.next()
        for response in prompt_responses:
            self._handle_progress(response)
        to_restart = []
        for response in token_responses:
            request = self._handle_token(response)
            if request is not None:
                to_restart.append(request)
        return to_restart

    def _handle_progress(self, response: Any) -> None:
        """Send a prompt's progress. At a checkpoint, store the prompt's caches.

        Args:
            response: mlx-lm's `PromptProcessingBatch.Response`.
        """
        request = self.running[response.uid]
        n_prompt = len(request.completion_request.prompt)
        # mlx-lm does not count tokens that came from the prefix cache.
        n_uncached_read, n_uncached = response.progress
        n_cached = n_prompt - n_uncached
        n_read = n_cached + n_uncached_read
        is_at_checkpoint = response.end_of_segment and n_read in request.checkpoints
        if is_at_checkpoint:
            caches_and_tokens = self.generator.read_so_far(response.uid)
            if caches_and_tokens is not None:  # None if the chunk has failed
                caches, tokens = caches_and_tokens
                self._checkpoints.insert_checkpoint(request, tokens, caches)
        request.put(PromptProgress(n_read, n_prompt))

    def _handle_token(self, response: Any) -> EngineRequest | None:
        """Send a token and, after the last one, the end of the answer. Return the request if it must be restarted.

        Args:
            response: mlx-lm's `GenerationBatch.Response`, or the error that ended the request.
        """
        request = self.running[response.uid]
        if response.finish_reason == "error":
            del self.running[response.uid]
            return self._fail_or_restart(request, response.error)
        n_logprobs = request.completion_request.n_logprobs
        if n_logprobs is not None:
            request.put(TokenLogprob.from_response(response, n_logprobs, self._loaded.tokenizer))
        answer = request.answer
        for piece in answer.add(response.token, response.finish_reason):
            request.put(piece)
        self._metrics.generated_tokens.inc()
        if answer.n_tokens == 1:
            self._metrics.first_token_seconds.observe(time.perf_counter() - request.since)
        if answer.finish_reason is not None:
            self._finish(request, response)
        return None

    def _finish(self, request: EngineRequest, response: Any) -> None:
        """Send the end of an answer, store its caches, and remove the request."""
        # mlx-lm does not check for stop strings, so it reports no finish reason for them.
        ended_at_stop_string = response.finish_reason is None
        if ended_at_stop_string:
            caches, tokens = self.generator.extract_cache([response.uid])[response.uid]
            self.generator.remove([response.uid])
        else:
            caches, tokens = response.prompt_cache, response.all_tokens
        report = request.report
        if report is not None:
            if not report.compressed:  # the report of an uncompressed cache has no sizes yet
                report.kv_bytes_before = report.kv_bytes_after = kv_bytes(caches)
            n_prompt = len(request.completion_request.prompt)
            for warning in report.warnings:
                log.warning("a prompt of %s tokens: %s", n_prompt, warning)
        self._checkpoints.insert_answer(request, tokens, caches)
        del self.running[response.uid]
        request.put(Finished(request.answer, report))

    def _fail_or_restart(self, request: EngineRequest, error: Exception) -> EngineRequest | None:
        """Send the error to the client, or return the request if it can be restarted.

        A damaged cached prefix is dropped. The request is then restarted without the prefix, unless its answer has
        already begun.
        """
        if isinstance(error, EntryFileError) and error.path is not None:
            log.warning("a prefix is not used: %s", error)
            self._loaded.prefixes.drop(error.path)
            answer_is_empty = request.answer.n_tokens == 0
            if answer_is_empty:
                request.report = None
                request.stored_prefix = None
                return request
        request.fail(error)
        return None
