"""Questions about documents, in two settings, answered by methods side by side.

known   the question stands in the prompt that is compressed: the policy may look at it
later   the document is read and compressed first, and each question comes to what is left

A document is read once for all methods that choose from full caches. Those that evict while they read, read twice or
keep every entry read for themselves. No method's answer depends on which others are asked.
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import file_bytes, kv_bytes
from ..engine.generate import stream_generate
from ..engine.prefill import prefill, read_book
from ..engine.report import NO_POLICY, CompressionReport
from ..engine.request import NO_POLICY_REASON, held_tokens
from . import loop
from .divergence import Reference
from .headwise import HeadWise, kinds_of, masked
from .loop import Record, Results
from .methods import KNOWN, LATER, Dataset, Document, Method, Place, Question
from .reading import Reading, read_once


def run(
    model: Any,
    dataset: Dataset,
    methods: Sequence[Method],
    settings: Sequence[str],
    results: Results,
    on_document: Callable[[bool], None] = lambda asked: None,
) -> list[Record]:
    """Every method's answer to every question in every setting; see `loop.run`."""
    named = {method.name: method for method in methods}

    def cells(place: Place):
        document = dataset.make(place)
        numbers = range(len(document.questions))
        wanted = [
            {"method": name, "setting": setting, **place, "question": i}
            for name, setting, i in itertools.product(named, settings, numbers)
        ]

        def measure(missing: list[Record]) -> Iterable[Record]:
            # All answers to a prompt, then the next prompt; of documents, all answers of a method.
            known = lambda cell: cell["question"] if cell["setting"] == KNOWN else 0  # noqa: E731
            missing.sort(key=lambda cell: (settings.index(cell["setting"]), known(cell)))
            asked = [(named[x["method"]], x["setting"], x["question"]) for x in missing]
            answers = Answers(model, dataset.tokenizer, document, asked)
            for cell, (method, setting, i) in zip(missing, asked):
                answer = answers.get(method, setting, i)
                yield cell | _record(document.questions[i], method, answer)

        return wanted, measure

    return loop.run(map(cells, dataset.places), results, on_document)


@dataclass(frozen=True)
class Answer:
    """A greedy answer.

    Attributes:
        tokens: with the one that ends it, if that came.
        cache: the prompt cache that it was given; with a `memory`, of all entries.
        report: of what was compressed.
        times: when decoding began, and when each token came that was decoded.
        n_before: so many of these are before the compression.
    """

    text: str
    tokens: list[int]
    cache: list
    report: CompressionReport
    times: list[float]
    n_before: int


def decode(
    model: Any,
    tokenizer: Any,
    prompt: Sequence[int],
    begun: Sequence[int],
    cache: list,
    max_tokens: int,
    report: CompressionReport | None = None,
    on_text: Callable[[str], None] = lambda text: None,
    on_report: Callable[[CompressionReport], None] = lambda report: None,
    **options: Any,
) -> Answer:
    """The greedy answer that goes on from a cache which has been fed the first tokens of prompt and answer.

    Args:
        begun: the answer's first tokens.
        report: of what the cache holds; None if what it has not been fed is compressed with it.
        on_text: called with the text as it comes, without the token that ends it.
        on_report: called when that has been compressed.
        **options: of `stream_generate`.
    """
    detokenizer, stops = tokenizer.detokenizer, tokenizer.eos_token_ids
    tokens: list[int] = []
    reports = [] if report is None else [report]
    n_before = 0

    def add(token: int) -> None:
        tokens.append(token)
        if token not in stops:
            detokenizer.add_token(token)
            on_text(detokenizer.last_segment)

    def compressed(found: CompressionReport) -> None:
        nonlocal n_before
        if not reports:
            n_before = len(times)
            on_report(found)
        reports.append(found)

    for token in begun:
        add(token)
    rest = [*prompt, *begun][held_tokens(model, cache) :]
    n_left = 0 if begun and begun[-1] in stops else max_tokens - len(begun)
    times = [time.perf_counter()]
    if n_left > 0:
        options |= {"prompt_cache": cache, "on_report": compressed}
        for response in stream_generate(model, tokenizer, rest, n_left, **options):
            times.append(time.perf_counter())
            add(response.token)
    detokenizer.finalize()
    on_text(detokenizer.last_segment)
    return Answer(detokenizer.text, tokens, cache, reports[0], times, n_before)


def _record(question: Question, method: Method, answer: Answer) -> Record:
    report, n_bytes = answer.report, kv_bytes(answer.cache)
    if report.compressed:
        # With a memory, the cache that was given holds all entries, and the answer's own is another.
        n_bytes = report.kv_bytes_after + (n_bytes if method.memory != "drop" else 0)
    return {
        "score": float(question.score(answer.text)),
        "answer": answer.text,
        "expected": question.expected,
        "tokens": len(question.prompt),
        "entries": report.entries if report.compressed else None,
        "kv_bytes": n_bytes,
        "file_bytes": file_bytes(answer.cache),
        "reason": None if method.policy is None else report.reason,
    }


class Answers:
    """The answers to questions about one document.

    Args:
        wanted: the methods, settings and numbers of the questions to come. They cost least question by question where
            the question is known, and method by method where it comes later.
    """

    def __init__(self, model, tokenizer, document: Document, wanted: Sequence[tuple]):
        self._model, self._tokenizer = model, tokenizer
        self._questions, self._n_shared = document.questions, document.n_shared
        self._document = document.questions[0].prompt[: document.n_shared]
        sharing = [each for each in wanted if each[0].shares_reading]
        self._policies = [method.scores for method, *_ in sharing]
        self._known = sorted({i for _, setting, i in sharing if setting == KNOWN})
        self._prompt: Reading | None = None  # document and question that were read last
        self._kept: tuple[Method | None, list, CompressionReport | None] = (None, [], None)
        self._full: dict[int, Answer] = {}  # by question: the same in both settings

    def get(self, method: Method, setting: str, i: int) -> Answer:
        """The answer to the `i`th question."""
        question = self._questions[i]
        if method.policy is None:
            if i not in self._full:
                self._full[i] = self._later(method, question)
            return self._full[i]
        if setting == LATER:
            return self._later(method, question)
        if method.shares_reading:
            return self._known_to(method, question)
        return self._decode(question, [], make_prompt_cache(self._model), None, method)

    def _later(self, method: Method, question: Question) -> Answer:
        if self._kept[0] != method:
            self._kept = method, *self._document_kept(method)
        _, cache, report = self._kept
        return self._decode(question, [], copy.deepcopy(cache), report, method)

    def _known_to(self, method: Method, question: Question) -> Answer:
        """What the full cache's answer and a small cache's have in common is found in one pass over it."""
        if self._prompt is None or self._prompt.tokens != question.prompt:
            self._prompt = self._reading.followed_by(question.prompt[self._n_shared :])
        full = self._prompt.answer(question.max_tokens, self._tokenizer.eos_token_ids)
        cache, report = self._compressed(self._prompt, method, answering=True)
        n = Reference(self._prompt, full).n_agreed(copy.deepcopy(cache))
        return self._decode(question, full[:n], cache, report, method)

    def _document_kept(self, method: Method) -> tuple[list, CompressionReport | None]:
        """The document's cache, and the report of its compression; None if that comes with the question."""
        policy: Any = method.policy
        if policy is None:
            report = CompressionReport(NO_POLICY, len(self._document), NO_POLICY_REASON)
            return self._reading.full(), report
        if method.shares_reading:
            return self._compressed(self._reading, method, answering=False)
        if method.memory == "drop":
            return prefill(self._model, self._document, policy)
        if policy.reads_in_blocks:
            return read_book(self._model, self._document, policy, method.memory)[0], None
        return self._reading.full(), None

    def _compressed(
        self, reading: Reading, method: Method, answering: bool
    ) -> tuple[list, CompressionReport]:
        policy: Any = method.policy
        if isinstance(policy, HeadWise):
            return masked(reading, policy, kinds_of(self._tokenizer, reading.tokens), answering)
        return reading.compressed(policy, answering)

    @cached_property
    def _reading(self) -> Reading:
        suffixes = [self._questions[i].prompt[self._n_shared :] for i in self._known]
        return read_once(self._model, self._document, self._policies, suffixes)

    def _decode(
        self,
        question: Question,
        begun: list[int],
        cache: list,
        report: CompressionReport | None,
        method: Method,
    ) -> Answer:
        options = {"policy": method.policy, **method.options} if report is None else {}
        asked = self._model, self._tokenizer, question.prompt, begun, cache
        return decode(*asked, question.max_tokens, report, **options)
