"""Tasks that tell policies apart: documents with many questions each, asked in two settings.

known   the question stands in the prompt that is compressed: the policy may look at it
later   the document is read and compressed first, and each question comes to what is left
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import file_bytes, kv_bytes
from ..caches.memories import make_caches
from ..chat.common_prefix import common_prefix
from ..demo.questions import question_prompt, token_counter
from ..demo.tasks import make_task
from ..engine.generate import generate_step, stream_generate
from ..engine.prefill import prefill, read
from ..engine.report import CompressionReport
from ..engine.rewind import Rewind
from ..policies import Policy, Stages
from .results import Record, Results

KNOWN, LATER = "known", "later"
SETTINGS = (KNOWN, LATER)
FULL = "full cache"
KEYS = ("way", "setting", "task", "length", "document", "question")
MAX_TOKENS = 60  # of an answer
QUESTION_TOKENS = 60  # of the prompt, template included


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
class Paper:
    """A document with its questions, as prompts.

    Attributes:
        prompts: token ids of each question after the document.
        values: the right answers.
        n_shared: tokens that all prompts begin with, whatever is asked: the document.
    """

    prompts: list[list[int]]
    values: list[str]
    n_shared: int


@dataclass(frozen=True)
class Suite:
    """Documents of every task and length.

    Attributes:
        n_questions: asked about each document, at most; some tasks have fewer.
    """

    tokenizer: Any
    tasks: Sequence[str]
    lengths: Sequence[int]
    n_documents: int
    n_questions: int
    seed: int = 0

    def setting(self) -> dict[str, Any]:
        """What the prompts depend on besides the tokenizer."""
        return {"task": "suite", "seed": self.seed}

    def paper(self, task: str, length: int, document: int) -> Paper:
        rng = random.Random(f"{self.seed} {task} {length} {document}")
        n_tokens = length - QUESTION_TOKENS
        text, questions = make_task(task, rng, n_tokens, token_counter(self.tokenizer))
        chosen = questions[: self.n_questions]
        prompts = [question_prompt(self.tokenizer, text, q.question) for q in chosen]
        other = question_prompt(self.tokenizer, text, "Why?")
        n_shared = common_prefix([*prompts, other])
        return Paper(prompts, [q.value for q in chosen], n_shared)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], Paper]]:
        for length in self.lengths:
            for task in self.tasks:
                for document in range(self.n_documents):
                    place = {"task": task, "length": length, "document": document}
                    yield place, self.paper(task, length, document)


def run(
    model,
    suite: Suite,
    ways: Sequence[Way],
    settings: Sequence[str],
    results: Results,
    on_document: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Ask what `results` does not hold yet; all records. `on_document` is called after each document's questions."""
    records = []
    for document, paper in suite:
        for way in ways:
            for setting in settings:
                here = {"way": way.name, "setting": setting, **document}
                places = [here | {"question": i} for i in range(len(paper.prompts))]
                if any(results.get(place) is None for place in places):
                    answers = _asked(model, suite.tokenizer, paper, way, setting)
                    for place, answer in zip(places, answers):
                        results.add(place | answer)
                records += [record for place in places if (record := results.get(place))]
                on_document()
    return records


def _asked(model, tokenizer, paper: Paper, way: Way, setting: str) -> Iterator[Record]:
    """The records of all questions about a document."""
    if setting == KNOWN and way.policy is not None:
        options = {"policy": way.policy, **way.options}
        for prompt, value in zip(paper.prompts, paper.values):
            cache = make_prompt_cache(model)
            yield _answer(model, tokenizer, prompt, value, cache, options)
        return
    n = paper.n_shared
    started = time.perf_counter()
    cache, options, compressed = _document_read(model, paper.prompts[0][:n], way)
    mx.eval([c.state for c in cache])
    seconds = time.perf_counter() - started
    for prompt, value in zip(paper.prompts, paper.values):
        before = Rewind(cache)
        record = _answer(model, tokenizer, prompt[n:], value, cache, options, compressed)
        before.restore()
        record["tokens"] = len(prompt)
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
    cache = make_caches(model, memory, way.policy)
    wanted = {"policy": way.policy, "memory": memory, "prompt_cache": cache}
    next(generate_step(mx.array(tokens), model, max_tokens=1, **wanted))
    return cache, {"policy": way.policy, **way.options}, None


def _answer(
    model,
    tokenizer,
    prompt: list[int],
    value: str,
    cache: list,
    options: dict[str, Any],
    compressed: CompressionReport | None = None,
) -> Record:
    """One question's answer; `compressed` is what was done to the cache before it."""
    reports: list[CompressionReport] = []
    text = ""
    started = time.perf_counter()
    first = None
    given = {"prompt_cache": cache, "on_report": reports.append, **options}
    for response in stream_generate(model, tokenizer, prompt, MAX_TOKENS, **given):
        first = first or time.perf_counter() - started
        text += response.text
    report = compressed or reports[0]
    # With a memory the cache that was given holds all entries, and the answer's own is another.
    beside = report.kv_bytes_after if options.get("memory", "drop") != "drop" else 0
    return {
        "right": text.strip() == value,
        "answer": text.strip(),
        "expected": value,
        "tokens": len(prompt),
        "entries": report.entries if report.compressed else None,
        "kv_bytes": kv_bytes(cache) + beside,
        "file_bytes": file_bytes(cache),
        "first_seconds": first or 0.0,
        "selection_seconds": report.selection_seconds,
        "votes": 0 if reports[0].verified is None else reports[0].verified.votes,
        "reason": report.reason if options.get("policy") or compressed else None,
    }
