"""Questions about documents, in two settings, answered by methods side by side.

known   the question stands in the prompt that is compressed: the policy may look at it
later   the document is read and compressed first, and each question comes to what is left

A document is read once for all methods that choose from full caches. Those that evict while they read, read twice or
keep every entry read for themselves. No method's answer depends on which others are asked.
"""

import copy
import itertools
import operator
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
from .headwise import HeadWise, masked
from .loop import Record, Results
from .methods import SETTINGS, Dataset, Document, Method
from .reading import Reading, n_before, read_once
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
        wanted = [
            {"method": name, "setting": setting, **place, "question": i}
            for name, setting in itertools.product(named, settings)
            for i in range(len(document.questions))
        ]

        def measure(missing: list[Record]) -> Iterator[Record]:
            known, later = ([c for c in missing if c["setting"] == s] for s in SETTINGS)
            asked = [named[cell["method"]] for cell in missing]
            numbers = sorted({cell["question"] for cell in known})
            answers = Answers(model, dataset.tokenizer, document, asked, numbers)
            # All answers to a prompt, then the next prompt; of documents, all answers of a method.
            for (i,), own in grouped(known, "question").items():
                found = answers.known(i, [named[cell["method"]] for cell in own])
                yield from map(operator.or_, own, found)
            for (name,), own in grouped(later, "method").items():
                found = answers.later(named[name], [cell["question"] for cell in own])
                yield from map(operator.or_, own, found)

        return wanted, measure

    return loop.run(map(cells, dataset.places), results, on_document)


@dataclass(frozen=True)
class Answer:
    """A greedy answer."""

    text: str
    tokens: list[int]  # with the one that ends it, if that came
    cache: list  # the prompt cache that it was given; with a `memory`, of all entries
    report: CompressionReport
    times: list[float]  # when decoding began, and when each token came that was decoded
    n_before: int  # so many of these are before the compression


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
        on_report: called when a prompt has been compressed.
        **options: of `stream_generate`, where what is kept has no report yet.
    """
    cache, report = kept
    detokenizer, stops = tokenizer.detokenizer, tokenizer.eos_token_ids
    tokens: list[int] = []
    times = [time.perf_counter()]
    n_before = 0

    def compressed(found: CompressionReport) -> None:
        nonlocal n_before, report
        report, n_before = found, len(times)
        on_report(found)

    def decoded() -> Iterator[int]:
        rest = [*prompt, *begun][held_tokens(model, cache) :]
        given = {"on_report": compressed, **options} if report is None else {}
        asked = model, tokenizer, rest, max_tokens - len(begun)
        for response in stream_generate(*asked, prompt_cache=cache, **given):
            times.append(time.perf_counter())
            yield response.token

    ended = len(begun) >= max_tokens or (begun and begun[-1] in stops)
    for token in itertools.chain(begun, [] if ended else decoded()):
        tokens.append(token)
        if token not in stops:
            detokenizer.add_token(token)
            on_text(detokenizer.last_segment)
    detokenizer.finalize()
    on_text(detokenizer.last_segment)
    assert report is not None
    return Answer(detokenizer.text, tokens, cache, report, times, n_before)


class Answers:
    """What is recorded of the answers to questions about one document.

    Args:
        known: the questions that may stand in the prompt.
    """

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
        self._full: dict[int, Record] = {}  # by question: the same in both settings

    @cached_property
    def _reading(self) -> Reading:
        return read_once(self._model, self._document, self._policies, self._suffixes.values())

    def known(self, i: int, methods: Iterable[Method]) -> Iterator[Record]:
        """Methods' answers to the `i`th question, which stands in the prompt that they compress."""
        prompt: Reading | None = None
        for method in methods:
            if not method.shares_reading:
                yield self._answer(method, i, (make_prompt_cache(self._model), None))
                continue
            prompt = prompt or self._reading.followed_by(self._suffixes[i])
            full = prompt.answer(self._questions[i].max_tokens, self._tokenizer.eos_token_ids)
            kept = self._compressed(prompt, method, answering=True)
            if method.policy is None:
                self._full[i] = self._answer(method, i, kept, full)
                yield self._full[i]
            else:  # what its answer and a small cache's have in common is found in one pass over it
                n = Reference(prompt, full).n_agreed(copy.deepcopy(kept[0]))
                yield self._answer(method, i, kept, full[:n], ahead=True)

    def later(self, method: Method, numbers: Iterable[int]) -> Iterator[Record]:
        """A method's answers to questions that come when the document has been compressed."""
        if method.policy is None:
            yield from map(self._of_full_cache, numbers)
            return
        cache, report = self._document_kept(method)
        for i in numbers:
            yield self._answer(method, i, (copy.deepcopy(cache), report))

    def _of_full_cache(self, i: int) -> Record:
        if i not in self._full:
            self._full[i] = self._answer(Method(), i, self._reading.compressed(None))
        return self._full[i]

    def _document_kept(self, method: Method) -> Kept:
        policy: Any = method.policy
        if method.shares_reading:
            return self._compressed(self._reading, method, answering=False)
        if method.options and policy.evicts:
            return self._reading.full(), None
        memory = method.options.get("memory", "drop")
        cache, report = prefill(self._model, self._document, policy, memory=memory)
        return cache, None if method.options else report

    def _compressed(self, reading: Reading, method: Method, answering: bool) -> Kept:
        if isinstance(method.policy, HeadWise):
            return masked(reading, method.policy, self._tokenizer, answering)
        return reading.compressed(method.policy, answering)

    def _answer(
        self,
        method: Method,
        i: int,
        kept: Kept,
        begun: Sequence[int] = (),
        ahead: bool = False,
    ) -> Record:
        """What is recorded of an answer; `ahead`: its first tokens were fed before what is kept was compressed."""
        question = self._questions[i]
        asked = self._model, self._tokenizer, question.prompt, begun, kept, question.max_tokens
        answer = decode(*asked, policy=method.policy, **method.options)
        report = answer.report
        n_bytes = report.kv_bytes_after if report.compressed else kv_bytes(answer.cache)
        n_tokens, before, policy = len(answer.tokens), 0, method.scores
        if kept[1] is None:
            before = answer.n_before + 1
        elif ahead and policy is not None:
            before = n_before(policy, len(question.prompt))
        return {
            "score": float(question.score(answer.text)),
            "answer": answer.text,
            "expected": question.expected,
            "tokens": len(question.prompt),
            "answer_tokens": n_tokens,
            "before": min(n_tokens, before),
            "entries": report.entries if report.compressed else None,
            "kv_bytes": n_bytes,
            "file_bytes": file_bytes(answer.cache),
            "reason": None if method.policy is None else report.reason,
        }
