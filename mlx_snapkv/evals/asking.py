"""Asking questions about documents, in two settings: the loop of the suite and of the field's benchmarks.

known   the question stands in the prompt that is compressed: the policy may look at it
later   the document is read and compressed first, and each question comes to what is left
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..engine.prefill import prefill, read
from ..engine.reading import read_book
from ..engine.report import CompressionReport
from ..policies import Policy, Stages
from . import by_mask
from .answers import answers
from .headwise import HeadWise
from .prompt import Answer, Prompt
from .results import Record, Results

KNOWN, LATER = "known", "later"
SETTINGS = (KNOWN, LATER)
FULL = "full cache"
BY_MASK = ", by mask"  # ends the names of ways that hide entries instead of dropping them
KEYS = ("way", "setting", "task", "length", "document", "question")


@dataclass(frozen=True)
class Way:
    """How answers come about.

    Attributes:
        name: what tables call it.
        policy: None is the full cache; head-wise methods answer by mask.
        options: `memory` and `verify`, as of `stream_generate`.
    """

    name: str
    policy: Policy | Stages | HeadWise | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """A document with a question, and the judgement of its answer.

    Attributes:
        prompt: token ids.
        expected: what a right answer has, for the records.
        score: of an answer's text as it was decoded, 0 to 1.
        max_tokens: of the answer.
        first_line: whether only the answer's first line that is not empty counts: it then ends there.
    """

    prompt: list[int]
    expected: Any
    score: Callable[[str], float]
    max_tokens: int
    first_line: bool = False

    def after(self, n_read: int, cache: list | None = None) -> Prompt:
        """What is left to ask once `cache` has read so many tokens."""
        return Prompt(self.prompt[n_read:], self.max_tokens, self.first_line, cache)


@dataclass(frozen=True)
class Paper:
    """A document's questions.

    Attributes:
        n_shared: tokens that all prompts begin with, whatever is asked: the document. At least one, and fewer than any
            prompt has.
    """

    questions: list[Question]
    n_shared: int


class Papers(Protocol):
    """Documents with what their records are filed under: `task`, `length` (a number, or None), `document`, and more."""

    tokenizer: Any

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Paper]]: ...

    def __len__(self) -> int: ...


def run(
    model,
    papers: Papers,
    ways: Sequence[Way],
    settings: Sequence[str],
    results: Results,
    on_document: Callable[[], None] = lambda: None,
    batch_size: int = 1,
) -> list[Record]:
    """Ask what `results` does not hold yet; all records. `on_document` is called after each document's questions.

    Up to `batch_size` questions are answered at once, of one way and setting, those of several documents too. Ways with
    options answer one at a time.
    """
    records = []
    for some in _several(papers, batch_size):
        for way in ways:
            for setting in settings:
                asked = _asked(model, papers.tokenizer, some, way, setting, results)
                given = papers.tokenizer, asked, way.policy, way.options
                for question, answer in answers(model, *given, batch_size):
                    results.add(question.record(answer))
                for _ in some:
                    on_document()
        for document, paper in some:
            places = _places(document, paper, ways, settings)
            records += [record for place in places if (record := results.get(place))]
    return records


def _several(papers: Papers, n_questions: int) -> Iterator[list[tuple[Record, Paper]]]:
    """The documents, so many together that they have at least so many questions."""
    some: list[tuple[Record, Paper]] = []
    for document, paper in papers:
        some.append((document, paper))
        if sum(len(paper.questions) for _, paper in some) >= n_questions:
            yield some
            some = []
    if some:
        yield some


def _places(
    document: Record, paper: Paper, ways: Sequence[Way], settings: Sequence[str]
) -> list[Record]:
    """What the records of a document's questions are filed under."""
    return [
        {"way": way.name, "setting": setting, **document, "question": i}
        for way in ways
        for setting in settings
        for i in range(len(paper.questions))
    ]


@dataclass(frozen=True)
class _Asked:
    """A question that is put to the model.

    Attributes:
        compressed: what was done to the document before; None if it is read with the question.
        seconds: that it took to read the document, if they count as the answer's.
    """

    place: Record
    question: Question
    way: Way
    compressed: CompressionReport | None = None
    seconds: float = 0.0

    def record(self, answer: Answer) -> Record:
        """What is kept of the answer; of seconds only those that were measured while nothing else was answered."""
        question, report = self.question, self.compressed or answer.report
        recalls = self.way.options.get("memory", "drop") != "drop"
        # With a memory the cache that was given holds all entries, and the answer's own is another.
        beside = answer.held_bytes + report.kv_bytes_after
        # By mask nothing is faster.
        first = None if isinstance(self.way.policy, HeadWise) else answer.first_seconds
        verified = answer.report.verified
        return self.place | {
            "score": float(question.score(answer.text)),
            "answer": answer.text,
            "expected": question.expected,
            "tokens": len(question.prompt),
            "entries": report.entries if report.compressed else None,
            "kv_bytes": beside if recalls else answer.kv_bytes(report),
            "file_bytes": answer.file_bytes,
            "first_seconds": None if first is None else first + self.seconds,
            "selection_seconds": None if first is None else report.selection_seconds,
            "votes": 0 if verified is None else verified.votes,
            "reason": None if self.way.policy is None else report.reason,
        }


def _asked(
    model, tokenizer, some: list[tuple[Record, Paper]], way: Way, setting: str, results: Results
) -> Iterator[tuple[_Asked, Prompt]]:
    """The questions without a record, each document read when its first one is asked for."""
    for document, paper in some:
        places = _places(document, paper, [way], [setting])
        missing = [pair for pair in zip(places, paper.questions) if results.get(pair[0]) is None]
        if not missing:
            continue
        if setting == KNOWN and way.policy is not None:
            for place, question in missing:
                yield _Asked(place, question, way), question.after(0)
            continue
        n = paper.n_shared
        started = time.perf_counter()
        cache, compressed = _document_read(model, tokenizer, paper.questions[0].prompt[:n], way)
        mx.eval([c.state for c in cache])
        # In the known setting the full cache answers as if it had read the document for each.
        seconds = time.perf_counter() - started if setting == KNOWN else 0.0
        for place, question in missing:
            yield _Asked(place, question, way, compressed, seconds), question.after(n, cache)


def _document_read(
    model, tokenizer, tokens: list[int], way: Way
) -> tuple[list, CompressionReport | None]:
    """A document's caches, and the compression that was made already."""
    if isinstance(way.policy, HeadWise):
        return by_mask.prefill(model, tokenizer, tokens, way.policy)
    memory = way.options.get("memory", "drop")
    if way.policy is None or (memory != "drop" and not way.policy.reads_in_blocks):
        cache = make_prompt_cache(model)
        read(model, mx.array(tokens), cache, {})
        return cache, None
    if memory == "drop":
        return prefill(model, tokens, way.policy)
    cache, _ = read_book(model, tokens, way.policy, memory)
    return cache, None
