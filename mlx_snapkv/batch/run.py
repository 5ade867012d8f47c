"""A file of requests, answered in one batch that they join and leave."""

import hashlib
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..completions.answer import Completion
from ..completions.answer_body import answer_body
from ..completions.body import Defaults
from ..completions.request import Bounds, CompletionRequest, completion_request
from ..engine.report import ENDED_EARLY, STAYING, CompressionReport
from ..errors import SnapKVError, brief
from ..models.counts import vocabulary
from ..models.trained_length import trained_length
from ..planning.footprint import Need
from .files import AnswersFile, Line
from .generator import CompressedBatchGenerator, require_together
from .memory import Memory


@dataclass
class Progress:
    """What a run has done: lines of the file, those that earlier runs did, tokens, and how often what warned."""

    lines: int = 0
    before: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    seconds: float = 0.0
    longest: int = 0  # tokens of a prompt
    warnings: Counter[str] = field(default_factory=Counter)


@dataclass
class Request:
    """A request on its way; `n_read` tokens of its prompt have been read."""

    line: Line
    asked: CompletionRequest
    need: Need | None
    answer: Completion
    report: CompressionReport | None = None
    n_read: int = 0


@dataclass
class Run:
    """The answers to a file's lines, each written when it is whole.

    Raises:
        SnapKVError: prompts of this model can't be decoded together, or the policy can't serve it.
        OSError: an answer can't be written.
    """

    model: Any
    tokenizer: Any
    answers: AnswersFile  # entered as a context; what it has already is not asked again
    options: dict[str, Any]  # of the `CompressedBatchGenerator`
    name: str  # the model's
    about: dict[str, Any]  # what the answers' field `mlx_snapkv` says of the run
    defaults: Defaults = field(default_factory=Defaults)
    concurrency: int = 8
    max_kv_bytes: int | None = None
    seed: int | None = None  # with their `custom_id`, of sampled requests that bring none
    on_progress: Callable[[Progress], None] = lambda progress: None  # after every step

    def __post_init__(self):
        require_together(self.model)
        self.progress = Progress()
        most = self.max_kv_bytes
        self._bounds = Bounds(trained_length(self.model) or sys.maxsize, vocabulary(self.model))
        self._memory = None if most is None else Memory(self.model, self.options, most)
        self._active: dict[int, Request] = {}
        self._waiting: Request | None = None
        self._generator = self._new_generator()

    def _new_generator(self) -> CompressedBatchGenerator:
        return CompressedBatchGenerator(
            self.model,
            stop_tokens=[[token] for token in self.tokenizer.eos_token_ids],
            on_report=lambda uid, report: setattr(self._active[uid], "report", report),
            completion_batch_size=self.concurrency,
            prefill_batch_size=1,  # several at a time take more memory, and on a CPU more time
            **self.options,
        )

    def answer(self, lines: Iterable[Line]) -> None:
        """Answer every line that the file of answers lacks, or write what is wrong with it."""
        started = time.perf_counter()
        requests = self._requests(lines)
        try:
            while self._admit(requests):
                self._step()
                self.progress.seconds = time.perf_counter() - started
                self.on_progress(self.progress)
        finally:
            self._generator.close()
        self.on_progress(self.progress)

    def _requests(self, lines: Iterable[Line]) -> Iterator[Request]:
        """The lines that can be answered; the others fail at once."""
        for line in lines:
            if self.answers.has(line):
                self.progress.lines += 1
                self.progress.before += 1
                continue
            try:
                yield self._request(line)
            except Exception as error:  # whatever is wrong with one line, the others go on
                self._fail(line, line.code, error)

    def _request(self, line: Line) -> Request:
        if line.body is None:
            raise SnapKVError(line.problem or "")
        seed = secrets.randbits(64)
        if self.seed is not None:
            name = f"{self.seed} {line.custom_id}".encode(errors="replace")
            seed = int.from_bytes(hashlib.sha256(name).digest()[:8], "big")
        asked = completion_request(line.body, self.tokenizer, self.defaults, seed, self._bounds)
        self.progress.longest = max(self.progress.longest, len(asked.prompt))
        need = None
        if self._memory is not None:
            need = self._memory.need(len(asked.prompt), asked.max_tokens)
        return Request(line, asked, need, Completion(asked, self.tokenizer))

    def _admit(self, requests: Iterator[Request]) -> bool:
        """Admit requests while they fit; whether there are any."""
        while len(self._active) < self.concurrency:
            request, self._waiting = self._waiting or next(requests, None), None
            if request is None:
                break
            held, others = self._generator.prompt_cache_nbytes, self._active.values()
            memory, need = self._memory, request.need
            if memory and need and memory.admit(need, others, held) is None:
                self._waiting = request
                break
            asked = request.asked
            try:
                (uid,) = self._generator.insert(
                    [asked.prompt],
                    [asked.max_tokens],
                    samplers=[asked.sampler],  # type: ignore[list-item]  # None is greedy
                    logits_processors=[asked.processors],
                )
                self._active[uid] = request
            except SnapKVError as error:  # of the policy, about this prompt
                self._fail(request.line, "invalid_request", error)
        return bool(self._active)

    def _step(self) -> None:
        """A token of every answer, and some of a prompt."""
        try:
            prompts, responses = self._generator.next()
        except Exception as error:  # without a policy, nobody knows whose it is: all end
            given_up, self._active = list(self._active.values()), {}
            self._generator.close()
            self._generator = self._new_generator()
            for request in given_up:
                self._fail(request.line, "failed", error)
            return
        for read in prompts:
            request = self._active[read.uid]
            self.progress.prompt_tokens += read.progress[0] - request.n_read
            request.n_read = read.progress[0]
        for response in responses:
            self._take(response)

    def _take(self, response: Any) -> None:
        request = self._active[response.uid]
        if response.finish_reason == "error":
            del self._active[response.uid]
            self._fail(request.line, "failed", response.error)
            return
        request.answer.add(response.token, response.finish_reason)
        self.progress.answer_tokens += 1
        if request.answer.finish_reason is None:
            return
        if response.finish_reason is None:  # at a stop text
            self._generator.remove([response.uid])
        del self._active[response.uid]
        if request.report is not None:
            self.progress.warnings.update(request.report.warnings)
        body = answer_body(request.answer, self.name, self._extra(request))
        self.answers.answer(request.line, body)
        self.progress.lines += 1

    def _extra(self, request: Request) -> dict[str, Any]:
        extra, report = dict(self.about), request.report
        if extra.get("policy") is not None:
            if report is None or not report.compressed:
                extra["reason"] = report.reason if report else ENDED_EARLY
            else:
                extra |= {"entries": report.entries, "kv_bytes": report.kv_bytes_after}
                extra |= {"kv_bytes_before": report.kv_bytes_before}
                extra |= {name: n for name in STAYING if (n := getattr(report, name))}
        return extra | ({"ignored": request.asked.ignored} if request.asked.ignored else {})

    def _fail(self, line: Line, code: str, error: Exception) -> None:
        why = str(error) if isinstance(error, SnapKVError) else brief(error)
        self.answers.error(line, code, why)
        self.progress.lines += 1
