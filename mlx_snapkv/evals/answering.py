"""Questions about documents, in two settings, answered by methods side by side.

known   the question stands in the prompt that is compressed: the policy may look at it
later   the document is read and compressed first, and each question comes to what is left

A document is read once for all methods that choose from full caches. Those that evict while they read, read twice or
keep every entry read for themselves. No method's answer depends on which others are asked.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import file_bytes, kv_bytes
from ..engine.generate import stream_generate
from ..engine.prefill import prefill, read_book
from ..engine.prompt_plan import gate
from ..engine.report import NO_POLICY, CompressionReport
from ..engine.request import NO_POLICY_REASON, held_tokens
from ..errors import SnapKVError
from ..policies import Policy, Stages
from . import loop
from .document import Dataset, Document, Place, Question
from .headwise import HeadWise, kinds_of, masked
from .loop import Record, Results
from .reading import Reading, judged, read_once, shares_reading

KNOWN, LATER = "known", "later"
SETTINGS = (KNOWN, LATER)
FULL = "full cache"
BY_MASK = ", by mask"  # ends the names of methods that hide entries instead of dropping them


@dataclass(frozen=True)
class Method:
    """How answers come about.

    Attributes:
        name: what tables call it.
        policy: None is the full cache; head-wise methods answer by mask.
        options: of `stream_generate`, such as `memory` and `verify`.
    """

    name: str
    policy: Policy | Stages | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def scores(self) -> Policy | Stages | None:
        """The policy that scores entries."""
        return self.policy.scores if isinstance(self.policy, HeadWise) else self.policy

    @property
    def shares_reading(self) -> bool:
        return not self.options and (self.scores is None or shares_reading(self.scores))

    @property
    def memory(self) -> str:
        return self.options.get("memory", "drop")


def require_compression(methods: Iterable[Method], lengths: Sequence[int]) -> None:
    """Raises: SnapKVError: a policy would leave prompts of all these lengths as they are, or has no room for them."""
    for method in methods:
        policy = method.scores
        reasons = [None if policy is None else gate(policy, length, None) for length in lengths]
        if lengths and all(reasons):
            raise SnapKVError(f"{method.name} would compress nothing here: {reasons[-1]}")


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

    def cells(place: Place, document: Document):
        n = len(document.questions)
        wanted = [
            {"method": name, "setting": setting, **place, "question": i}
            for name, setting, i in itertools.product(named, settings, range(n))
        ]

        def measure(missing: list[Record]) -> Iterable[Record]:
            # All answers to a prompt, then the next prompt; of documents, all answers of a method.
            known = lambda cell: cell["question"] if cell["setting"] == KNOWN else 0  # noqa: E731
            missing.sort(key=lambda cell: (settings.index(cell["setting"]), known(cell)))
            asked = [(named[x["method"]], x["setting"], x["question"]) for x in missing]
            answers = Answers(model, dataset.tokenizer, document, asked)
            for cell, (method, setting, i) in zip(missing, asked):
                question = document.questions[i]
                answer = answers.get(method, setting, question)
                yield cell | _record(question, method, answer)

        return wanted, measure

    return loop.run((cells(*each) for each in dataset), results, on_document)


@dataclass(frozen=True)
class Answer:
    """An answer's text, the prompt cache it was given (with a `memory`, of all entries), and what was compressed."""

    text: str
    cache: list
    report: CompressionReport


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
        self._n_shared = document.n_shared
        self._document = document.questions[0].prompt[: document.n_shared]
        self._policies = [method.scores for method, *_ in wanted if method.shares_reading]
        known = {i for method, setting, i in wanted if setting == KNOWN and method.shares_reading}
        self._suffixes = [self._suffix(document.questions[i]) for i in sorted(known)]
        self._prompt: Reading | None = None  # document and question that were read last
        self._kept: tuple[str, list, CompressionReport | None] = ("", [], None)
        self._full: dict[int, Answer] = {}  # by question: the same in both settings

    def get(self, method: Method, setting: str, question: Question) -> Answer:
        if not method.shares_reading and setting == KNOWN:
            options = {"policy": method.policy, **method.options}
            cache = make_prompt_cache(self._model)
            return self._decoded(question.prompt, cache, question.max_tokens, options)
        if method.policy is None:
            if id(question) not in self._full:
                self._full[id(question)] = self._later(method, question)
            return self._full[id(question)]
        return self._known(method, question) if setting == KNOWN else self._later(method, question)

    def _later(self, method: Method, question: Question) -> Answer:
        if self._kept[0] != method.name:
            self._kept = method.name, *self._document_kept(method)
        _, cache, report = self._kept
        options = {"policy": method.policy, **method.options} if report is None else {}
        rest = self._suffix(question)
        return self._decoded(rest, copy.deepcopy(cache), question.max_tokens, options, report)

    def _known(self, method: Method, question: Question) -> Answer:
        if self._prompt is None or self._prompt.tokens != question.prompt:
            self._prompt = self._reading.followed_by(self._suffix(question))
        reading, stops = self._prompt, self._tokenizer.eos_token_ids
        full = reading.answer(question.max_tokens, stops)
        cache, report = self._chosen(reading, method, answering=True)
        # As many tokens as the policy looks ahead, and the next one, are chosen by all entries.
        n_chosen = held_tokens(self._model, cache) - len(reading.tokens) + 1
        answer = self._agreed(full, n_chosen, cache)
        if answer == full or (answer and answer[-1] in stops):
            return Answer(self._text(answer), cache, report)
        rest = [*reading.tokens, *answer][held_tokens(self._model, cache) :]
        n_left = question.max_tokens - len(answer)
        return self._decoded(rest, cache, n_left, {}, report, before=answer)

    def _agreed(self, full: list[int], n_chosen: int, cache: list) -> list[int]:
        """The full cache's answer up to the first token that a small cache chooses otherwise, and that token.

        One pass over the answer finds it. The cache has then been fed all tokens but the last, or fewer.

        Args:
            n_chosen: tokens that are the full cache's in any case; the cache has been fed all of them but the last.
        """
        known = full[max(0, n_chosen - 1) : -1]
        if n_chosen < 1 or not known:
            return full[: max(0, n_chosen)]
        before = copy.deepcopy(cache)
        chosen: Any = mx.argmax(judged(self._model, cache, known), axis=-1).tolist()
        pairs = zip(chosen, full[n_chosen:])
        n_right = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        if n_right == len(known):
            return full
        cache[:] = before
        if n_right:
            judged(self._model, cache, known[:n_right])
        return [*full[: n_chosen + n_right], chosen[n_right]]

    def _document_kept(self, method: Method) -> tuple[list, CompressionReport | None]:
        """The document's cache, and the report of its compression; None if that comes with the question."""
        policy: Any = method.policy
        if policy is None:
            report = CompressionReport(NO_POLICY, len(self._document), NO_POLICY_REASON)
            return self._reading.full(), report
        if method.shares_reading:
            return self._chosen(self._reading, method, answering=False)
        if method.memory == "drop":
            return prefill(self._model, self._document, policy)
        if policy.reads_in_blocks:
            return read_book(self._model, self._document, policy, method.memory)[0], None
        return self._reading.full(), None

    def _chosen(
        self, reading: Reading, method: Method, answering: bool
    ) -> tuple[list, CompressionReport]:
        policy: Any = method.policy
        if isinstance(policy, HeadWise):
            return masked(reading, policy, kinds_of(self._tokenizer, reading.tokens), answering)
        return reading.compressed(policy, answering)

    @cached_property
    def _reading(self) -> Reading:
        return read_once(self._model, self._document, self._policies, self._suffixes)

    def _suffix(self, question: Question) -> list[int]:
        return question.prompt[self._n_shared :]

    def _decoded(
        self,
        tokens: list[int],
        cache: list,
        max_tokens: int,
        options: dict[str, Any],
        report: CompressionReport | None = None,
        before: Sequence[int] = (),
    ) -> Answer:
        """The greedy answer that goes on from a cache once it has been fed `tokens`.

        Args:
            options: of `stream_generate`.
            report: of what the cache holds; None if these tokens are compressed.
            before: the answer's first tokens.
        """
        reports: list[CompressionReport] = []
        options |= {"prompt_cache": cache, "on_report": reports.append}
        responses = stream_generate(self._model, self._tokenizer, tokens, max_tokens, **options)
        answer = [*before, *(response.token for response in responses)]
        return Answer(self._text(answer), cache, report or reports[0])

    def _text(self, tokens: Sequence[int]) -> str:
        """An answer as mlx-lm's loop decodes it, without the token that ends it."""
        detokenizer = self._tokenizer.detokenizer
        for token in tokens:
            if token not in self._tokenizer.eos_token_ids:
                detokenizer.add_token(token)
        detokenizer.finalize()
        return detokenizer.text
