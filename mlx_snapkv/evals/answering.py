"""Questions about documents, in two settings, answered by methods side by side.

known   the question stands in the prompt that is compressed: the policy may look at it
later   the document is read and compressed first, and each question comes to what is left

A document is read once for all methods that choose from full caches. Those that evict while they read, read twice or
keep every entry read for themselves. No method's answer depends on which others are asked.
"""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import file_bytes, kv_bytes
from ..engine.generate import stream_generate
from ..engine.prefill import prefill, read_book
from ..engine.report import CompressionReport
from ..engine.request import held_tokens
from . import loop
from .divergence import Reference
from .headwise import HeadWise, kinds_of, masked
from .loop import Record, Results
from .methods import KNOWN, LATER, Dataset, Document, Method
from .reading import Reading, read_once

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
            # All answers to a prompt, then the next prompt; of documents, all answers of a method.
            known = lambda cell: cell["question"] if cell["setting"] == KNOWN else 0  # noqa: E731
            missing.sort(key=lambda cell: (settings.index(cell["setting"]), known(cell)))
            asked = [(named[x["method"]], x["setting"], x["question"]) for x in missing]
            answers = Answers(model, dataset.tokenizer, document, asked)
            for cell, each in zip(missing, asked):
                yield cell | answers.record(*each)

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
        on_report: called when a prompt that the cache had not been fed has been compressed.
        **options: of `stream_generate`.
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
    """The answers to questions about one document.

    Args:
        wanted: the methods, settings and numbers of the questions to come. They cost least question by question where
            the question is known, and method by method where it comes later.
    """

    def __init__(self, model: Any, tokenizer: Any, document: Document, wanted: Sequence[tuple]):
        self._model, self._tokenizer = model, tokenizer
        self._questions, self._n_shared = document.questions, document.n_shared
        self._document = document.questions[0].prompt[: document.n_shared]
        sharing = [each for each in wanted if each[0].shares_reading]
        self._policies = [method.scores for method, *_ in sharing]
        self._known = sorted({i for _, setting, i in sharing if setting == KNOWN})
        self._reading = functools.cache(self._read)
        self._prompt = functools.lru_cache(1)(
            lambda i: self._reading().followed_by(self._suffix(i))
        )
        self._document_kept = functools.lru_cache(1)(self._keep_document)
        self._full = functools.cache(lambda i: self._later(Method(), i))  # in both settings

    def record(self, method: Method, setting: str, i: int) -> Record:
        """What is recorded of the answer to the `i`th question."""
        question, answer = self._questions[i], self.get(method, setting, i)
        report, n_bytes = answer.report, kv_bytes(answer.cache)
        if report.compressed:
            # With a memory, the cache that was given holds all entries, and the answer's own is another.
            n_bytes = report.kv_bytes_after + (n_bytes if method.options else 0)
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

    def get(self, method: Method, setting: str, i: int) -> Answer:
        """The answer to the `i`th question."""
        if method.policy is None:
            return self._full(i)
        if setting == LATER:
            return self._later(method, i)
        if not method.shares_reading:
            return self._decode(method, i, [], (make_prompt_cache(self._model), None))
        # What the full cache's answer and a small cache's have in common is found in one pass over it.
        question, prompt = self._questions[i], self._prompt(i)
        full = prompt.answer(question.max_tokens, self._tokenizer.eos_token_ids)
        kept = self._compressed(prompt, method, answering=True)
        n = Reference(prompt, full).n_agreed(copy.deepcopy(kept[0]))
        return self._decode(method, i, full[:n], kept)

    def _later(self, method: Method, i: int) -> Answer:
        cache, report = self._document_kept(method)
        return self._decode(method, i, [], (copy.deepcopy(cache), report))

    def _keep_document(self, method: Method) -> Kept:
        policy: Any = method.policy
        if method.shares_reading:
            return self._compressed(self._reading(), method, answering=False)
        if not method.options:
            return prefill(self._model, self._document, policy)
        if policy.reads_in_blocks:
            memory = method.options["memory"]
            return read_book(self._model, self._document, policy, memory)[0], None
        return self._reading().full(), None

    def _compressed(self, reading: Reading, method: Method, answering: bool) -> Kept:
        if isinstance(method.policy, HeadWise):
            kinds = kinds_of(self._tokenizer, reading.tokens)
            return masked(reading, method.policy, kinds, answering)
        return reading.compressed(method.policy, answering)

    def _suffix(self, i: int) -> list[int]:
        return self._questions[i].prompt[self._n_shared :]

    def _read(self) -> Reading:
        suffixes = map(self._suffix, self._known)
        return read_once(self._model, self._document, self._policies, suffixes)

    def _decode(self, method: Method, i: int, begun: list[int], kept: Kept) -> Answer:
        question = self._questions[i]
        options = {"policy": method.policy, **method.options} if kept[1] is None else {}
        asked = self._model, self._tokenizer, question.prompt, begun, kept
        return decode(*asked, question.max_tokens, **options)
