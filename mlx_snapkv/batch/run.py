"""Answer a file of requests with continuous batching."""

import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..completions.answer import Completion
from ..completions.answer_body import answer_body
from ..completions.body import Defaults
from ..completions.request import Bounds, CompletionRequest, completion_request
from ..engine.report import ENDED_EARLY, CompressionReport
from ..errors import SnapKVError, brief
from ..planning.entry_sizes import EntrySizes
from ..planning.footprint import Need
from .files import AnswersFile, Line
from .generator import CompressedBatchGenerator, require_batchable
from .memory import Memory


@dataclass
class Progress:
    """The progress of a run.

    Attributes:
        lines: number of finished lines, including those from earlier runs.
        before: number of lines finished by earlier runs.
        prompt_tokens: number of prompt tokens read.
        answer_tokens: number of answer tokens generated.
        seconds: duration of this run.
        longest: length of the longest prompt in tokens.
        warnings: how often each warning occurred in the reports.
    """

    lines: int = 0
    before: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    seconds: float = 0.0
    longest: int = 0
    warnings: Counter[str] = field(default_factory=Counter)


@dataclass
class Request:
    """A request in the batch.

    Attributes:
        line: the request's line in the file.
        need: memory that the request needs.
        report: the compression report, or None before compression.
        n_read: number of prompt tokens read so far.
    """

    line: Line
    completion: CompletionRequest
    need: Need
    answer: Completion
    report: CompressionReport | None = None
    n_read: int = 0


@dataclass
class Run:
    """Answers the lines of a file, and writes each answer as soon as it is complete.

    Attributes:
        answers: the answer file. Call `Run.answer` inside this file's `with` block. Requests that already have an
            answer or error are skipped.
        options: keyword arguments for `CompressedBatchGenerator`.
        defaults: values for fields that a request omits.
        concurrency: maximum number of requests in the batch.
        max_kv_bytes: KV memory limit in bytes; see `Memory`.
        seed: if set, requests without a seed get one derived from this seed and their `custom_id`. Otherwise, their
            seeds are random.

    Raises:
        SnapKVError: the options are invalid, the setting does not support the model, or mlx-lm can't decode several
            prompts together with this model.
        OSError: an answer can't be written.
    """

    model: Any
    tokenizer: Any
    answers: AnswersFile
    options: dict[str, Any]
    defaults: Defaults = field(default_factory=Defaults)
    concurrency: int = 8
    max_kv_bytes: int | None = None
    seed: int | None = None

    def __post_init__(self):
        """Check the model and the options. Most of these checks happen when the generator is created."""
        require_batchable(self.model)
        self.progress = Progress()
        self._active: dict[int, Request] = {}
        self._waiting: Request | None = None
        self._generator = self._new_generator()
        self._bounds = Bounds.of_model(self.model)
        self._memory = Memory(EntrySizes(self.model), self.options, self.max_kv_bytes)

    def _new_generator(self) -> CompressedBatchGenerator:
        return CompressedBatchGenerator(
            self.model,
            stop_tokens=[[token] for token in self.tokenizer.eos_token_ids],
            on_report=lambda uid, report: setattr(self._active[uid], "report", report),
            completion_batch_size=self.concurrency,
            # Reading several prompts together needs more memory and, on a CPU, more time.
            prefill_batch_size=1,
            **self.options,
        )

    def answer(self, lines: Iterable[Line], on_progress: Callable[[Progress], None]) -> None:
        """Write an answer or an error for every line that has neither yet. Call `on_progress` after every step."""
        started = time.perf_counter()
        requests = self._requests_of(lines)
        try:
            while self._admit(requests):
                self._run_step()
                self.progress.seconds = time.perf_counter() - started
                on_progress(self.progress)
        finally:
            self._generator.close()
        on_progress(self.progress)

    def _requests_of(self, lines: Iterable[Line]) -> Iterator[Request]:
        """Yield a request for every valid line, and write an error for every invalid one.

        Lines that already have an answer or an error are skipped. This also updates `progress` with the number of
        skipped lines and the length of the longest prompt.
        """
        for line in lines:
            if self.answers.has(line):
                self.progress.lines += 1
                self.progress.before += 1
                continue
            try:
                request = self._request_of(line)
            except Exception as error:  # an invalid line must not end the run
                self._fail(line, line.code, error)
            else:
                yield request

    def _request_of(self, line: Line) -> Request:
        """Create the request for a line. Raises: SnapKVError: the line is invalid, or its request can't be answered."""
        if line.body is None:
            raise SnapKVError(line.problem or "")
        seed = self._seed_of(line)
        completion = completion_request(
            line.body, self.tokenizer, self.defaults, seed, self._bounds
        )
        n_prompt = len(completion.prompt)
        self.progress.longest = max(self.progress.longest, n_prompt)
        completion = self._memory.limit_answer(completion)
        need = self._memory.need(n_prompt, completion.max_tokens)
        answer = Completion(completion, self.tokenizer)
        return Request(line=line, completion=completion, need=need, answer=answer)

    def _seed_of(self, line: Line) -> int:
        """Return a 64-bit sampling seed for a request that has none.

        The result is derived from the run's seed and the line's `custom_id`, so that answers do not depend on the order
        of the lines or on earlier runs. If the run has no seed, the result is random.
        """
        if self.seed is None:
            return secrets.randbits(64)
        seed_and_id = f"{self.seed} {line.custom_id}".encode(errors="replace")
        first_64_bits = hashlib.sha256(seed_and_id).digest()[:8]
        return int.from_bytes(first_64_bits, "big")

    def _admit(self, requests: Iterator[Request]) -> bool:
        """Add requests until the batch is full, none is left, or the next one does not fit in memory.

        A request that does not fit is stored in `_waiting`. Return False if the batch is empty.
        """
        while len(self._active) < self.concurrency:
            request = self._waiting or next(requests, None)
            self._waiting = None
            if request is None:
                break
            cache_bytes = self._generator.prompt_cache_nbytes
            peak_bytes = self._memory.admit(request.need, self._active.values(), cache_bytes)
            if peak_bytes is None:
                self._waiting = request
                break
            completion = request.completion
            (uid,) = self._generator.insert(
                [completion.prompt],
                [completion.max_tokens],
                samplers=[completion.sampler],  # type: ignore[list-item]  # None is greedy
                logits_processors=[completion.processors],
            )
            self._active[uid] = request
        return bool(self._active)

    def _run_step(self) -> None:
        """Read one prompt chunk, and decode one token per answer."""
        try:
            prompt_responses, answer_responses = self._generator.next()
        except Exception as error:
            # Without a policy or sparse attention, mlx-lm does not say which request failed, so all of them fail.
            self._fail_all_active(error)
            return
        for response in prompt_responses:
            request = self._active[response.uid]
            n_read, _ = response.progress
            self.progress.prompt_tokens += n_read - request.n_read
            request.n_read = n_read
        for response in answer_responses:
            self._add_response(response)

    def _fail_all_active(self, error: Exception) -> None:
        """Write an error for every request in the batch, and create a new generator for the requests that follow."""
        requests = list(self._active.values())
        self._active = {}
        self._generator.close()
        self._generator = self._new_generator()
        for request in requests:
            self._fail(request.line, "failed", error)

    def _add_response(self, response: Any) -> None:
        """Add a response to the request's answer.

        If the answer is complete, write it to the file. If the request failed, write an error.
        """
        request = self._active[response.uid]
        if response.finish_reason == "error":
            del self._active[response.uid]
            self._fail(request.line, "failed", response.error)
            return
        request.answer.add(response.token, response.finish_reason)
        self.progress.answer_tokens += 1
        if request.answer.finish_reason is None:
            return
        if response.finish_reason is None:
            # A stop string ended the answer, but the generator does not know that.
            self._generator.remove([response.uid])
        del self._active[response.uid]
        if request.report is not None:
            self.progress.warnings.update(request.report.warnings)
        body = answer_body(request.answer, self.answers.model, self._extra_field(request))
        self.answers.answer(request.line, body)
        self.progress.lines += 1

    def _extra_field(self, request: Request) -> dict[str, Any]:
        """Return an answer's `mlx_snapkv` field.

        It has the run's settings, the outcome of compression, and the names of request fields that were ignored.
        """
        extra = dict(self.answers.about)
        if extra.get("policy") is not None:
            extra |= _compression_fields(request.report)
        if request.completion.ignored:
            extra["ignored"] = request.completion.ignored
        return extra

    def _fail(self, line: Line, code: str, error: Exception) -> None:
        """Write an error in place of a line's answer."""
        message = str(error) if isinstance(error, SnapKVError) else brief(error)
        self.answers.error(line, code, message)
        self.progress.lines += 1


def _compression_fields(report: CompressionReport | None) -> dict[str, Any]:
    """Return the sizes in a report, or the reason why nothing was compressed."""
    if report is None:
        return {"reason": ENDED_EARLY}
    if not report.compressed:
        return {"reason": report.reason}
    return {
        "entries": report.entries,
        "kv_bytes": report.kv_bytes_after,
        "kv_bytes_before": report.kv_bytes_before,
        **report.staying_fields,
    }
