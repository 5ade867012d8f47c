"""Answer questions about documents with several methods, in two settings.

known   the question is part of the prompt that is compressed, so the policy may use it
later   the document is compressed first, and each question is read on the compressed cache

A document is read once for all methods that start from a full cache: policies that compress it, and sparse attention
with dense prefill. A method reads the document itself if it evicts during prefill, accumulates the attention of all
queries, or uses sparse prefill or a store. A method's answer does not depend on the other methods.
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
from mlx_snapkv.engine.token_ids import common_prefix
from mlx_snapkv.measure.compare import decode
from mlx_snapkv.measure.divergence import Reference
from mlx_snapkv.measure.methods import KNOWN, LATER, Method
from mlx_snapkv.measure.reading import Reading, read_once
from mlx_snapkv.measure.records import Measure, Record, Results
from mlx_snapkv.measure.sparse_reading import starts_from_full_cache
from mlx_snapkv.measure.tables import grouped
from mlx_snapkv.planning.config import CompressionConfig
from mlx_snapkv.planning.request_plan import plan_request
from mlx_snapkv.sparse.options import Sparse

from .datasets import Dataset, Document


def run(
    model: Any,
    dataset: Dataset,
    methods: Sequence[Method],
    settings: Sequence[str],
    results: Results,
    on_document: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Ask every method every question in every setting and return the records. See `Results.complete`."""
    method_by_name = {method.name: method for method in methods}

    def keys_and_measure(place: Record) -> tuple[list[Record], Measure]:
        document = dataset.make(place)
        all_keys = [
            {"method": name, "setting": setting, **place, "question": i}
            for name, setting in itertools.product(method_by_name, settings)
            for i in range(len(document.questions))
        ]

        def measure(missing: list[Record]) -> Iterator[Record]:
            known = [keys for keys in missing if keys["setting"] == KNOWN]
            later = [keys for keys in missing if keys["setting"] == LATER]
            missing_methods = [method_by_name[keys["method"]] for keys in missing]
            known_questions = sorted({keys["question"] for keys in known})
            answers = Answers(model, dataset.tokenizer, document, missing_methods, known_questions)
            # Known: one question after the other, because all methods share a question's prompt. Later: one method
            # after the other, because all questions share a method's compressed document.
            for (i,), question_keys in grouped(known, "question").items():
                question_methods = [method_by_name[keys["method"]] for keys in question_keys]
                records = answers.known(i, question_methods)
                yield from map(operator.or_, question_keys, records)
            for (name,), method_keys in grouped(later, "method").items():
                questions = [keys["question"] for keys in method_keys]
                records = answers.later(method_by_name[name], questions)
                yield from map(operator.or_, method_keys, records)

        return all_keys, measure

    return results.complete(map(keys_and_measure, dataset.places), on_document)


class Answers:
    """Records of the answers to questions about one document.

    Args:
        methods: the methods that will answer.
        known_questions: numbers of the questions that will be asked in the setting "known".
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        document: Document,
        methods: Iterable[Method],
        known_questions: Iterable[int],
    ):
        """Split the prompts into the document, which is read once, and the questions."""
        self._model = model
        self._tokenizer = tokenizer
        self._questions = document.questions
        n_shared = document.n_shared
        self._document = self._questions[0].prompt[:n_shared]
        self._suffixes = {i: self._questions[i].prompt[n_shared:] for i in known_questions}
        self._policies = [method.policy for method in methods if method.shares_reading]
        # The full cache's answers by question, which are the same in both settings.
        self._full_records: dict[int, Record] = {}
        # The document's caches after a prefill with sparse attention's options, keyed by the options that affect
        # prefill. A budget affects only decoding, unless the document fits in it.
        self._sparse_caches: dict[tuple[Sparse, bool], list] = {}

    @cached_property
    def _reading(self) -> Reading:
        return read_once(self._model, self._document, self._policies, self._suffixes.values())

    def known(self, i: int, methods: Iterable[Method]) -> Iterator[Record]:
        """Yield records of the methods' answers to question `i`, which is part of the compressed prompt."""
        question = self._questions[i]
        prompt: Reading | None = None
        for method in methods:
            if starts_from_full_cache(method.policy):
                yield self._answer(method, i, self._reading.full_cache())
                continue
            if not method.shares_reading:
                yield self._answer(method, i, make_prompt_cache(self._model))
                continue
            if prompt is None:
                prompt = self._reading.followed_by(self._suffixes[i])
                if question.begun:
                    prompt.force(question.begun)
            full_answer = prompt.answer(question.max_tokens, self._tokenizer.eos_token_ids)
            cache, report = prompt.compress(method.policy, answering=True)
            if method.policy is None:
                self._full_records[i] = self._answer(method, i, cache, report, full_answer)
                yield self._full_records[i]
            else:  # one forward pass finds how much of the full cache's answer this cache repeats
                n_agreed = _n_agreed(prompt, full_answer, cache)
                first_tokens = full_answer[: max(n_agreed, len(question.begun))]
                config = CompressionConfig(method.policy)
                plan = plan_request(self._model, config, len(question.prompt))
                n_before = plan.n_decoded_before_compression
                yield self._answer(method, i, cache, report, first_tokens, n_before)

    def later(self, method: Method, questions: Iterable[int]) -> Iterator[Record]:
        """Yield records of a method's answers to questions that are read after the compression."""
        if method.policy is None:
            yield from map(self._full_record, questions)
            return
        cache, report = self._document_cache(method)
        for i in questions:
            yield self._answer(method, i, copy.deepcopy(cache), report)

    def _full_record(self, i: int) -> Record:
        """Return the record of the full cache's answer."""
        if i not in self._full_records:
            self._full_records[i] = self._answer(Method(), i, *self._reading.compress(None))
        return self._full_records[i]

    def _document_cache(self, method: Method) -> tuple[list, CompressionReport | None]:
        """Return the document's cache, compressed by a method, and the report if it does not depend on the question."""
        if method.shares_reading:
            return self._reading.compress(method.policy)
        policy: Any = method.policy
        if not isinstance(policy, Sparse):
            return prefill(self._model, self._document, policy)
        # Sparse attention reads the question as a new turn, which has its own report.
        if starts_from_full_cache(policy):
            return self._reading.full_cache(), None
        fits_budget = policy.fits(len(self._document))
        key = replace(policy, top_k=None, budget=None), fits_budget
        if key not in self._sparse_caches:
            self._sparse_caches[key], _ = prefill(self._model, self._document, policy)
        return self._sparse_caches[key], None

    def _answer(
        self,
        method: Method,
        i: int,
        cache: list,
        report: CompressionReport | None = None,
        first_tokens: Sequence[int] = (),
        n_before: int = 0,
    ) -> Record:
        """Decode the answer to question `i` and return its record.

        Args:
            method: the method that answers.
            i: number of the question.
            cache: see `measure.compare.decode`.
            report: see `measure.compare.decode`.
            first_tokens: see `measure.compare.decode`.
            n_before: number of answer tokens decoded before the compression, if there is a report.
        """
        question = self._questions[i]
        options: dict[str, Any] = {"policy": method.policy}
        if question.begun and report is None:  # one by one: each token chooses what it reads
            options["sampler"] = forcing(question.begun)
        elif question.begun and not first_tokens:
            first_tokens = question.begun
        answer = decode(
            self._model,
            self._tokenizer,
            question.prompt,
            question.max_tokens,
            cache,
            report,
            first_tokens,
            **options,
        )
        text = answer.text
        if question.begun:
            text = self._text_of(answer.tokens[len(question.begun) :])
        if report is None:
            n_before = answer.n_times_before + 1
        report = answer.report
        n_tokens = len(answer.tokens)
        return {
            "score": float(question.score(text)),
            "answer": text,
            "expected": question.expected,
            "tokens": len(question.prompt),
            "answer_tokens": n_tokens,
            "before": min(n_tokens, n_before),
            "entries": report.entries if report.compressed else None,
            "kv_bytes": report.kv_bytes_after if report.compressed else kv_bytes(answer.cache),
            "reason": None if method.policy is None else report.reason,
        }

    def _text_of(self, tokens: Iterable[int]) -> str:
        """Decode an answer's last tokens."""
        end_tokens = self._tokenizer.eos_token_ids
        return self._tokenizer.decode([token for token in tokens if token not in end_tokens])


def _n_agreed(prompt: Reading, answer: Sequence[int], cache: list) -> int:
    """Return how many of an answer's first tokens a cache has already read, or predicts as most likely."""
    logprobs = Reference(prompt, answer).predictions(copy.deepcopy(cache))
    n_read = len(answer) - len(logprobs)
    if n_read == len(answer):
        return n_read
    predicted: Any = mx.argmax(logprobs, axis=-1).tolist()
    return n_read + common_prefix([predicted, answer[n_read:]])


def forcing(tokens: Sequence[int]) -> Callable[[mx.array], mx.array]:
    """Return a sampler that returns these tokens first, and then the most likely ones."""
    remaining_tokens = iter(tokens)

    def sampler(logprobs: mx.array) -> mx.array:
        token = next(remaining_tokens, None)
        return mx.argmax(logprobs, axis=-1) if token is None else mx.array([token])

    return sampler
