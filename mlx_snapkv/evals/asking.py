"""Asking questions about documents, in two settings: the loop of the suite and of the field's benchmarks.

known   the question stands in the prompt that is compressed: the policy may look at it
later   the document is read and compressed first, and each question comes to what is left
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import file_bytes, kv_bytes
from ..engine.generate import stream_generate
from ..engine.prefill import prefill, read
from ..engine.reading import read_book
from ..engine.report import CompressionReport
from ..engine.rewind import Rewind
from ..policies import Policy, Stages
from .results import Record, Results

KNOWN, LATER = "known", "later"
SETTINGS = (KNOWN, LATER)
FULL = "full cache"
KEYS = ("way", "setting", "task", "length", "document", "question")


@dataclass(frozen=True)
class Way:
    """How answers come about.

    Attributes:
        name: what tables call it.
        policy: None is the full cache.
        options: `memory` and `verify`, as of `stream_generate`.
    """

    name: str
    policy: Policy | Stages | None = None
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
) -> list[Record]:
    """Ask what `results` does not hold yet; all records. `on_document` is called after each document's questions."""
    records = []
    for document, paper in papers:
        for way in ways:
            for setting in settings:
                here = {"way": way.name, "setting": setting, **document}
                places = [here | {"question": i} for i in range(len(paper.questions))]
                if any(results.get(place) is None for place in places):
                    answers = _asked(model, papers.tokenizer, paper, way, setting)
                    for place, answer in zip(places, answers):
                        results.add(place | answer)
                records += [record for place in places if (record := results.get(place))]
                on_document()
    return records


def _asked(model, tokenizer, paper: Paper, way: Way, setting: str) -> Iterator[Record]:
    """The records of all questions about a document."""
    if setting == KNOWN and way.policy is not None:
        options = {"policy": way.policy, **way.options}
        for question in paper.questions:
            cache = make_prompt_cache(model)
            yield _answer(model, tokenizer, question, 0, cache, options)
        return
    n = paper.n_shared
    started = time.perf_counter()
    cache, options, compressed = _document_read(model, paper.questions[0].prompt[:n], way)
    mx.eval([c.state for c in cache])
    seconds = time.perf_counter() - started
    for question in paper.questions:
        before = Rewind(cache)
        record = _answer(model, tokenizer, question, n, cache, options, compressed)
        before.restore()
        if setting == KNOWN:  # the full cache answers as if it had read the document for each
            record["first_seconds"] += seconds
        yield record


def _document_read(
    model, tokens: list[int], way: Way
) -> tuple[list, dict[str, Any], CompressionReport | None]:
    """A document's caches, the options of the answers to come, and the compression that was made already."""
    memory = way.options.get("memory", "drop")
    if way.policy is None or (memory != "drop" and not way.policy.reads_in_blocks):
        cache = make_prompt_cache(model)
        read(model, mx.array(tokens), cache, {})
        return cache, {} if way.policy is None else {"policy": way.policy, **way.options}, None
    if memory == "drop":
        cache, report = prefill(model, tokens, way.policy)
        return cache, {}, report
    cache, _ = read_book(model, tokens, way.policy, memory)
    return cache, {"policy": way.policy, **way.options}, None


def _answer(
    model,
    tokenizer,
    question: Question,
    n_read: int,
    cache: list,
    options: dict[str, Any],
    compressed: CompressionReport | None = None,
) -> Record:
    """A question's answer on a cache that has read `n_read` of its tokens; `compressed`: what was done to it before."""
    reports: list[CompressionReport] = []
    text = ""
    started = time.perf_counter()
    first = None
    given = {"prompt_cache": cache, "on_report": reports.append, **options}
    tokens = question.prompt[n_read:]
    responses = stream_generate(model, tokenizer, tokens, question.max_tokens, **given)
    with contextlib.closing(responses):  # type: ignore[type-var]
        for response in responses:
            first = first or time.perf_counter() - started
            text += response.text
            if question.first_line and "\n" in text.lstrip("\n"):
                break
    report = compressed or reports[0]
    # With a memory the cache that was given holds all entries, and the answer's own is another.
    beside = report.kv_bytes_after if options.get("memory", "drop") != "drop" else 0
    return {
        "score": float(question.score(text)),
        "answer": text,
        "expected": question.expected,
        "tokens": len(question.prompt),
        "entries": report.entries if report.compressed else None,
        "kv_bytes": kv_bytes(cache) + beside,
        "file_bytes": file_bytes(cache),
        "first_seconds": first or 0.0,
        "selection_seconds": report.selection_seconds,
        "votes": 0 if reports[0].verified is None else reports[0].verified.votes,
        "reason": report.reason if options.get("policy") or compressed else None,
    }
