"""The answers to questions about one document, which is read once for all methods that choose from full caches.

Those that evict while they read, read twice or keep everything at hand read for themselves. No method's answer depends
on which others are asked.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..engine.generate import stream_generate
from ..engine.prefill import prefill
from ..engine.reading import read_book
from ..engine.report import NO_POLICY, CompressionReport
from ..engine.request import held_tokens
from ..engine.serving import NO_POLICY_REASON
from ..policies import Policy, Stages
from .document import Document, Question
from .headwise import HeadWise, kinds_of, masked
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
        """Whether it chooses from what is read for all."""
        return not self.options and (self.scores is None or shares_reading(self.scores))


@dataclass(frozen=True)
class Answer:
    """What came of a question.

    Attributes:
        cache: the prompt cache that was given; with a `memory` it holds all entries.
        report: what became of the tokens that were compressed.
    """

    text: str
    cache: list
    report: CompressionReport


class Asked:
    """A document that questions are asked about.

    Args:
        wanted: the methods, settings and numbers of the questions to come, in the order in which they cost least: of
            a setting question by question where it is known, and method by method where it comes later.
    """

    def __init__(self, model, tokenizer, document: Document, wanted: Sequence[tuple]):
        self._model, self._tokenizer, self._document = model, tokenizer, document
        self._policies = [method.scores for method, *_ in wanted if method.shares_reading]
        known = {i for method, setting, i in wanted if setting == KNOWN and method.shares_reading}
        self._tails = {i: self._tail(document.questions[i]) for i in sorted(known)}
        self._prompt: Reading | None = None  # document and question that were read last
        self._kept: tuple[str, list, CompressionReport | None] = ("", [], None)
        self._full: dict[int, Answer] = {}  # by question: the same in both settings

    def answer(self, method: Method, setting: str, question: Question) -> Answer:
        if not method.shares_reading and setting == KNOWN:
            cache, options = make_prompt_cache(self._model), {"policy": method.policy}
            return self._decoded(
                question.prompt, cache, question.max_tokens, options | method.options
            )
        if method.policy is None:
            if id(question) not in self._full:
                self._full[id(question)] = self._later(method, question)
            return self._full[id(question)]
        return self._known(method, question) if setting == KNOWN else self._later(method, question)

    def _later(self, method: Method, question: Question) -> Answer:
        name, cache, report = self._kept
        if name != method.name:
            cache, report = self._document_kept(method)
            self._kept = method.name, cache, report
        rest, cache = self._tail(question), copy.deepcopy(cache)
        options = {"policy": method.policy, **method.options} if report is None else {}
        return self._decoded(rest, cache, question.max_tokens, options, report)

    def _known(self, method: Method, question: Question) -> Answer:
        reading = self._reading_with(question)
        stops = self._tokenizer.eos_token_ids
        full = reading.answer(question.max_tokens, stops)
        cache, report = self._chosen(reading, method, answering=True)
        # As many tokens as the policy looks ahead, and the next one, are chosen by all entries.
        n_chosen = held_tokens(self._model, cache) - len(reading.tokens) + 1
        answer = self._agreed(full, n_chosen, cache)
        if answer == full or (answer and answer[-1] in stops):
            return Answer(self._text(answer), cache, report)
        rest = [*reading.tokens, *answer][held_tokens(self._model, cache) :]
        return self._decoded(
            rest, cache, question.max_tokens - len(answer), {}, report, before=answer
        )

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
        chosen: list[int] = mx.argmax(judged(self._model, cache, known), axis=-1).tolist()  # type: ignore[assignment]
        n_right = len(
            [*itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, full[n_chosen:]))]
        )
        if n_right == len(known):
            return full
        cache[:] = before
        if n_right:
            judged(self._model, cache, known[:n_right])
        return [*full[: n_chosen + n_right], chosen[n_right]]

    def _document_kept(self, method: Method) -> tuple[list, CompressionReport | None]:
        """The document's cache, and the report of its compression; None if that comes with the question."""
        tokens = self._document.questions[0].prompt[: self._document.n_shared]
        policy: Any = method.policy
        memory = method.options.get("memory", "drop")
        if policy is None:
            return self._reading.full(), CompressionReport(NO_POLICY, len(tokens), NO_POLICY_REASON)
        if method.shares_reading:
            return self._chosen(self._reading, method, answering=False)
        if memory == "drop":
            return prefill(self._model, tokens, policy)
        if policy.reads_in_blocks:
            return read_book(self._model, tokens, policy, memory)[0], None
        return self._reading.full(), None

    def _chosen(
        self, reading: Reading, method: Method, answering: bool
    ) -> tuple[list, CompressionReport]:
        """What a method keeps of a prompt that was read; see `Reading`."""
        if isinstance(method.policy, HeadWise):
            kinds = kinds_of(self._tokenizer, reading.tokens)
            return masked(reading, method.policy, kinds, answering)
        policy: Any = method.policy
        return reading.answering(policy) if answering else reading.compressed(policy)

    @cached_property
    def _reading(self) -> Reading:
        tokens = self._document.questions[0].prompt[: self._document.n_shared]
        return read_once(self._model, tokens, self._policies, self._tails.values())

    def _reading_with(self, question: Question) -> Reading:
        if self._prompt is None or self._prompt.tokens != question.prompt:
            self._prompt = self._reading.followed_by(self._tail(question))
        return self._prompt

    def _tail(self, question: Question) -> list[int]:
        return question.prompt[self._document.n_shared :]

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
        answer = list(before)
        for response in stream_generate(
            self._model,
            self._tokenizer,
            tokens,
            max_tokens,
            prompt_cache=cache,
            on_report=reports.append,
            **options,
        ):
            answer.append(response.token)
        return Answer(self._text(answer), cache, report or reports[0])

    def _text(self, tokens: Sequence[int]) -> str:
        """An answer as mlx-lm's loop decodes it, without the token that ends it."""
        detokenizer = self._tokenizer.detokenizer
        for token in tokens:
            if token not in self._tokenizer.eos_token_ids:
                detokenizer.add_token(token)
        detokenizer.finalize()
        return detokenizer.text
