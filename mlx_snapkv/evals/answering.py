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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import file_bytes, kv_bytes
from ..engine.generate import stream_generate
from ..engine.prefill import prefill
from ..engine.report import CompressionReport
from ..engine.request import held_tokens
from . import loop
from .divergence import Reference
from .headwise import HeadWise, kinds_of, masked
from .loop import Record, Results
from .methods import SETTINGS, Dataset, Document, Method, Question
from .reading import Reading, read_once
from .tables import grouped

Kept = tuple[list, CompressionReport | None]  # None if what it has not been fed is compressed, too


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

    def cells(place: Record):
        document = dataset.make(place)
        numbers = range(len(document.questions))
        wanted = [
            {"method": name, "setting": setting, **place, "question": i}
            for name, setting, i in itertools.product(named, settings, numbers)
        ]

        def measure(missing: list[Record]) -> Iterable[Record]:
            known, later = ([c for c in missing if c["setting"] == s] for s in SETTINGS)
            asked = [named[cell["method"]] for cell in missing]
            numbers = sorted({cell["question"] for cell in known})
            answers = Answers(model, dataset.tokenizer, document, asked, numbers)
            # All answers to a prompt, then the next prompt; of documents, all answers of a method.
            for (i,), own in grouped(known, "question").items():
                yield from map(_record, own, answers.known(i, [named[c["method"]] for c in own]))
            for (name,), own in grouped(later, "method").items():
                yield from map(
                    _record, own, answers.later(named[name], [c["question"] for c in own])
                )

        def _record(cell: Record, answer: Answer) -> Record:
            return cell | answer.record(document.questions[cell["question"]], named[cell["method"]])

        return wanted, measure

    return loop.run(map(cells, dataset.places), results, on_document)


@dataclass(frozen=True)
class Answer:
    """A greedy answer.

    Attributes:
        tokens: with the one that ends it, if that came.
        cache: the prompt cache that it was given; with a `memory`, of all entries.
        times: when decoding began, and when each token came that was decoded.
        n_before: so many of these are before the compression.
    """

    text: str
    tokens: list[int]
    cache: list
    report: CompressionReport
    times: list[float]
    n_before: int

    def record(self, question: Question, method: Method) -> Record:
        """What is recorded of a method's answer to a question."""
        report, n_bytes = self.report, kv_bytes(self.cache)
        if report.compressed:
            # With a memory, the cache that was given holds all entries, and the answer's own is another.
            n_bytes = report.kv_bytes_after + (n_bytes if method.options else 0)
        return {
            "score": float(question.score(self.text)),
            "answer": self.text,
            "expected": question.expected,
            "tokens": len(question.prompt),
            "entries": report.entries if report.compressed else None,
            "kv_bytes": n_bytes,
            "file_bytes": file_bytes(self.cache),
            "reason": None if method.policy is None else report.reason,
        }


def decode(
    model: Any,
    tokenizer: Any,
    prompt: Sequence[int],
    begun: Sequence[int],
    kept: Kept,
    max_tokens: int,
    on_text: Callable[[str], None] = lambda text: None,
    on_report: Callable[[CompressionReport], None] = lambda report: None,
    **options: Any,
) -> Answer:
    """The greedy answer that goes on from a cache which has been fed the first tokens of prompt and answer.

    Args:
        begun: the answer's first tokens.
        on_text: called with the text as it comes, without the token that ends it.
        **options: of `stream_generate`; `on_report` is called if this compresses a prompt.
    """
    cache, report = kept
    detokenizer, stops = tokenizer.detokenizer, tokenizer.eos_token_ids
    tokens: list[int] = []
    n_before = 0

    def add(token: int) -> None:
        tokens.append(token)
        if token not in stops:
            detokenizer.add_token(token)
            on_text(detokenizer.last_segment)

    def compressed(found: CompressionReport) -> None:
        nonlocal n_before, report
        if report is None:
            report, n_before = found, len(times)
            on_report(found)

    for token in begun:
        add(token)
    n_left = 0 if begun and begun[-1] in stops else max_tokens - len(begun)
    times = [time.perf_counter()]
    if n_left > 0:
        rest = [*prompt, *begun][held_tokens(model, cache) :]
        options |= {"prompt_cache": cache, "on_report": compressed}
        for response in stream_generate(model, tokenizer, rest, n_left, **options):
            times.append(time.perf_counter())
            add(response.token)
    detokenizer.finalize()
    on_text(detokenizer.last_segment)
    assert report is not None
    return Answer(detokenizer.text, tokens, cache, report, times, n_before)


class Answers:
    """The answers to questions about one document, of which the `known` ones may stand in the prompt."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        document: Document,
        methods: Iterable[Method],
        known: Iterable[int],
    ):
        self._model, self._tokenizer, self._questions = model, tokenizer, document.questions
        self._document = document.questions[0].prompt[: document.n_shared]
        self._suffixes = {i: self._questions[i].prompt[document.n_shared :] for i in known}
        self._policies = [method.scores for method in methods if method.shares_reading]
        self._full: dict[int, Answer] = {}  # by question: the same in both settings

    @cached_property
    def _reading(self) -> Reading:
        return read_once(self._model, self._document, self._policies, self._suffixes.values())

    def full(self, i: int) -> Answer:
        """The full cache's answer to the `i`th question."""
        if i not in self._full:
            self._full[i] = self._decode(Method(), i, [], self._reading.compressed(None))
        return self._full[i]

    def known(self, i: int, methods: Iterable[Method]) -> Iterator[Answer]:
        """Methods' answers to the `i`th question, which stands in the prompt that they compress."""
        prompt: Reading | None = None
        for method in methods:
            if method.policy is None:
                yield self.full(i)
            elif not method.shares_reading:
                yield self._decode(method, i, [], (make_prompt_cache(self._model), None))
            else:
                prompt = prompt or self._reading.followed_by(self._suffixes[i])
                most, stops = self._questions[i].max_tokens, self._tokenizer.eos_token_ids
                full = prompt.answer(most, stops)
                kept = self._compressed(prompt, method, answering=True)
                # What the full cache's answer and a small cache's have in common is found in one pass over it.
                n = Reference(prompt, full).n_agreed(copy.deepcopy(kept[0]))
                yield self._decode(method, i, full[:n], kept)

    def later(self, method: Method, numbers: Iterable[int]) -> Iterator[Answer]:
        """A method's answers to questions that come when the document has been compressed."""
        if method.policy is None:
            yield from map(self.full, numbers)
            return
        cache, report = self._document_kept(method)
        for i in numbers:
            yield self._decode(method, i, [], (copy.deepcopy(cache), report))

    def _document_kept(self, method: Method) -> Kept:
        policy: Any = method.policy
        if method.shares_reading:
            return self._compressed(self._reading, method, answering=False)
        if method.options and not policy.reads_in_blocks:
            return self._reading.full(), None
        memory = method.options.get("memory", "drop")
        cache, report = prefill(self._model, self._document, policy, memory=memory)
        return cache, None if method.options else report

    def _compressed(self, reading: Reading, method: Method, answering: bool) -> Kept:
        if isinstance(method.policy, HeadWise):
            kinds = kinds_of(self._tokenizer, reading.tokens)
            return masked(reading, method.policy, kinds, answering)
        return reading.compressed(method.policy, answering)

    def _decode(self, method: Method, i: int, begun: list[int], kept: Kept) -> Answer:
        question = self._questions[i]
        options = {"policy": method.policy, **method.options} if kept[1] is None else {}
        asked = self._model, self._tokenizer, question.prompt, begun, kept
        return decode(*asked, question.max_tokens, **options)
