"""Answer questions about documents with several methods, in two settings.

known   the question is part of the prompt that is compressed, so the policy may use it
later   the document is compressed first, and each question is read on the compressed cache

A document is read once for all methods that compress a full cache. Methods that evict during prefill, read twice or use
sparse attention read it themselves. A method's answer does not depend on the other methods.
"""

import copy
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlx_snapkv.caches.layers import kv_bytes
from mlx_snapkv.engine.prefill import prefill
from mlx_snapkv.engine.report import CompressionReport
from mlx_snapkv.measure.compare import decode
from mlx_snapkv.measure.divergence import Reference
from mlx_snapkv.measure.methods import ANSWER_SETTINGS, Method
from mlx_snapkv.measure.reading import Reading, n_decoded_before, read_once
from mlx_snapkv.measure.records import Record, Results
from mlx_snapkv.measure.tables import grouped
from mlx_snapkv.sparse.options import Sparse

from .datasets import Dataset, Document


def run(
    model: Any,
    dataset: Dataset,
    methods: Sequence[Method],
    settings: Sequence[str],
    results: Results,
    on_document: Callable[[bool], None] = lambda asked: None,
) -> list[Record]:
    """Ask every method every question in every setting and return the records. See `Results.complete`."""
    named = {method.name: method for method in methods}

    def cells(place: Record):
        document = dataset.make(place)
        wanted = [
            {"method": name, "setting": setting, **place, "question": i}
            for name, setting in itertools.product(named, settings)
            for i in range(len(document.questions))
        ]

        def measure(missing: list[Record]) -> Iterator[Record]:
            known, later = ([c for c in missing if c["setting"] == s] for s in ANSWER_SETTINGS)
            asked = [named[cell["method"]] for cell in missing]
            numbers = sorted({cell["question"] for cell in known})
            answers = Answers(model, dataset.tokenizer, document, asked, numbers)
            # Known: one question after the other, since each is a prompt. Later: one method after the other.
            for (i,), own in grouped(known, "question").items():
                found = answers.known(i, [named[cell["method"]] for cell in own])
                yield from map(operator.or_, own, found)
            for (name,), own in grouped(later, "method").items():
                found = answers.later(named[name], [cell["question"] for cell in own])
                yield from map(operator.or_, own, found)

        return wanted, measure

    return results.complete(map(cells, dataset.places), on_document)


class Answers:
    """Records of the answers to questions about one document.

    Args:
        methods: the methods that will answer.
        known: numbers of the questions that will be asked in the setting "known".
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        document: Document,
        methods: Iterable[Method],
        known: Iterable[int],
    ):
        """Split the prompts into the document, which is read once, and the questions."""
        self._model, self._tokenizer, self._questions = model, tokenizer, document.questions
        self._document = document.questions[0].prompt[: document.n_shared]
        self._suffixes = {i: self._questions[i].prompt[document.n_shared :] for i in known}
        self._policies = [m.policy for m in methods if m.shares_reading]
        self._full: dict[int, Record] = {}  # the full cache's answers by question, in both settings
        # Caches that sparse attention has read, keyed by the options that affect prefill. A budget affects only
        # decoding, unless the document fits it.
        self._sparse: dict[tuple[Sparse, bool], list] = {}

    @cached_property
    def _reading(self) -> Reading:
        return read_once(self._model, self._document, self._policies, self._suffixes.values())

    def known(self, i: int, methods: Iterable[Method]) -> Iterator[Record]:
        """Yield records of the methods' answers to question `i`, which is part of the compressed prompt."""
        question = self._questions[i]
        prompt: Reading | None = None
        for method in methods:
            if not method.shares_reading:
                yield self._answer(method, i, make_prompt_cache(self._model))
                continue
            if prompt is None:
                prompt = self._reading.followed_by(self._suffixes[i])
                if question.begun:
                    prompt.force(question.begun)
            full = prompt.answer(question.max_tokens, self._tokenizer.eos_token_ids)
            cache, report = prompt.compress(method.policy, answering=True)
            if method.policy is None:
                self._full[i] = self._answer(method, i, cache, report, full)
                yield self._full[i]
            else:  # one forward pass finds how much of the full cache's answer this cache repeats
                n = Reference(prompt, full).n_agreed(copy.deepcopy(cache))
                n = max(n, len(question.begun))
                yield self._answer(method, i, cache, report, full[:n], ahead=True)

    def later(self, method: Method, numbers: Iterable[int]) -> Iterator[Record]:
        """Yield records of a method's answers to questions that are read after the compression."""
        if method.policy is None:
            yield from map(self._of_full_cache, numbers)
            return
        cache, report = self._document_kept(method)
        for i in numbers:
            yield self._answer(method, i, copy.deepcopy(cache), report)

    def _of_full_cache(self, i: int) -> Record:
        """Return the record of the full cache's answer."""
        if i not in self._full:
            self._full[i] = self._answer(Method(), i, *self._reading.compress(None))
        return self._full[i]

    def _document_kept(self, method: Method) -> tuple[list, CompressionReport | None]:
        """Return the document's cache, compressed by a method, and the report if it does not depend on the question."""
        if method.shares_reading:
            return self._reading.compress(method.policy)
        policy: Any = method.policy
        if not isinstance(policy, Sparse):
            return prefill(self._model, self._document, policy)
        # Sparse attention reads the question as a new turn, which has its own report.
        fits = policy.fits(len(self._document))
        reading = replace(policy, top_k=None, budget=None), fits
        if reading not in self._sparse:
            self._sparse[reading] = prefill(self._model, self._document, policy)[0]
        return self._sparse[reading], None

    def _answer(
        self,
        method: Method,
        i: int,
        cache: list,
        report: CompressionReport | None = None,
        begun: Sequence[int] = (),
        ahead: bool = False,
    ) -> Record:
        """Decode the answer to question `i` and return its record.

        Args:
            method: the method that answers.
            i: number of the question.
            cache: see `measure.compare.decode`.
            report: see `measure.compare.decode`.
            begun: see `measure.compare.decode`.
            ahead: whether the answer's first tokens were fed before the compression.
        """
        question = self._questions[i]
        options: dict[str, Any] = {"policy": method.policy}
        if question.begun and report is None:  # one by one: each token chooses what it reads
            options["sampler"] = forcing(question.begun)
        answer = decode(
            self._model,
            self._tokenizer,
            question.prompt,
            question.max_tokens,
            cache,
            report,
            begun or (question.begun if report else ()),
            **options,
        )
        text = answer.text
        if question.begun:
            text = self._decoded(answer.tokens[len(question.begun) :])
        n_tokens, before, policy = len(answer.tokens), 0, method.policy
        if report is None:
            before = answer.n_times_before + 1
        elif ahead and policy is not None:
            before = n_decoded_before(self._model, policy, len(question.prompt))
        report = answer.report
        n_bytes = report.kv_bytes_after if report.compressed else kv_bytes(answer.cache)
        return {
            "score": float(question.score(text)),
            "answer": text,
            "expected": question.expected,
            "tokens": len(question.prompt),
            "answer_tokens": n_tokens,
            "before": min(n_tokens, before),
            "entries": report.entries if report.compressed else None,
            "kv_bytes": n_bytes,
            "reason": None if method.policy is None else report.reason,
        }

    def _decoded(self, tokens: Iterable[int]) -> str:
        """Decode an answer's last tokens."""
        stops = self._tokenizer.eos_token_ids
        return self._tokenizer.decode([token for token in tokens if token not in stops])


def forcing(tokens: Sequence[int]) -> Callable[[mx.array], mx.array]:
    """Return a sampler that returns these tokens first, and then the most likely ones."""
    left = iter(tokens)

    def sampler(logprobs: mx.array) -> mx.array:
        token = next(left, None)
        return mx.argmax(logprobs, axis=-1) if token is None else mx.array([token])

    return sampler
