"""How far a model's predictions move when what came before them is compressed.

text    a text goes on, compressed where a piece of it ends: all tokens judged are read from what is left
known   a question stands behind the piece, and the policy sees it: judged is the full cache's own greedy answer
later   the piece is compressed first, and the question comes to what is left: the same answer is judged
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import attention_layers
from ..engine.report import NO_POLICY, CompressionReport
from ..entries.quantization import n_bytes
from ..policies import Policy, Stages
from . import loop
from .answering import KNOWN, LATER, Method
from .divergence import Reference
from .loop import Record, Results
from .reading import Reading, read_once, shares_reading
from .texts import Frame, Piece, frame_of

TEXT = "text"
SETTINGS = (TEXT, KNOWN, LATER)
KEYS = ("method", "setting", "document", "piece")

AnyPolicy = Policy | Stages


@dataclass(frozen=True)
class Comparison:
    """What is judged, and of which methods.

    Attributes:
        questions: each piece is asked one of them, in turn, where it is asked any.
        n: tokens of an answer, at most.
    """

    pieces: Sequence[Piece]
    methods: Sequence[Method]
    settings: Sequence[str]
    questions: Sequence[str]
    n: int


def run(
    model: Any,
    tokenizer: Any,
    comparison: Comparison,
    results: Results,
    on_piece: Callable[[bool], None] = lambda measured: None,
) -> list[Record]:
    """The records of all pieces, settings and methods; see `loop.run`."""
    methods: Any = {method.name: method.policy for method in comparison.methods}
    settings = comparison.settings
    asked = [None] if set(settings) == {TEXT} else comparison.questions
    framed = [(question, frame_of(tokenizer, question)) for question in asked]

    def cells(piece: Piece, question: str | None, frame: Frame):
        def measure(missing: list[Record]) -> Iterable[Record]:
            judges = Judges(
                model,
                piece,
                frame,
                [p for cell in missing if (p := methods[cell["method"]]) is not None],
                {cell["setting"] for cell in missing},
                comparison.n,
                tokenizer.eos_token_ids,
            )
            judges.read()
            for cell in missing:
                setting, policy = cell["setting"], methods[cell["method"]]
                figures = judges.judge(setting, policy, loop.next_stream())
                yield cell | {"question": None if setting == TEXT else question} | figures

        place = {"document": piece.document, "piece": piece.number}
        pairs = itertools.product(settings, methods)
        return [{"method": name, "setting": s, **place} for s, name in pairs], measure

    pieces = zip(comparison.pieces, itertools.cycle(framed))
    return loop.run((cells(piece, *frame) for piece, frame in pieces), results, on_piece)


def without_lookahead(policy: AnyPolicy) -> AnyPolicy:
    """The policy for a text that nothing answers."""
    if isinstance(policy, Stages):
        chooses: Any = without_lookahead(policy.decode_policy)
        return dataclasses.replace(policy, decode_policy=chooses)
    return dataclasses.replace(policy, lookahead=0) if policy.lookahead else policy  # type: ignore[call-arg]


@dataclass
class Judges:
    """A piece of a text, read once, and the figures of every policy.

    Args:
        frame: what stands around the piece.
        policies, settings: all that will be compared.
        n: tokens of an answer, at most.
        stops: tokens that end it.
    """

    model: Any
    piece: Piece
    frame: Frame
    policies: Sequence[AnyPolicy]
    settings: Collection[str]
    n: int
    stops: Collection[int]

    def read(self) -> None:
        """Read all that is judged, and let the full cache answer."""
        for setting in self.settings:
            self._reference(setting)

    def judge(self, setting: str, policy: AnyPolicy | None, stream: Any) -> Record:
        """A policy's figures, or the full cache's; some of them are arrays that `stream` has to compute."""
        if policy is None:
            reading = self._reading(setting)
            report = CompressionReport(NO_POLICY, len(reading.tokens))
            figures = self._figures(setting, self._reference(setting).logprobs)
            return figures | self._held(reading.full(), report) | {"kl": 0.0}
        if setting == KNOWN and not shares_reading(policy):
            return self._generated(policy)
        if setting == KNOWN:
            cache, report = self._prompt.answering(policy)
        else:
            cache, report = self._reading(setting).compressed(without_lookahead(policy))
        held = self._held(cache, report)
        with mx.stream(stream):
            logprobs = self._reference(setting).predictions(cache)
            return self._figures(setting, logprobs) | held

    def _held(self, cache: list, report: CompressionReport) -> Record:
        """What a cache holds once it is compressed: entries, the mean over layers, and their bytes."""
        held = [layer.entries_in(cache).held() for layer in attention_layers(self.model, cache)]
        kept = [n for n in report.entries_kept if n is not None]
        return {
            "entries": round(fmean(kept)) if kept else report.prompt_tokens,
            "kv_bytes": sum(n_bytes((e.stored_keys, e.stored_values)) for e in held),
            "reason": report.reason,
        }

    def _figures(self, setting: str, logprobs: mx.array) -> Record:
        """Means over the tokens judged, of which a cache was asked for the last ones: the others are as they were."""
        reference = self._reference(setting)
        return {
            "tokens": len(reference),
            "judged": len(logprobs),
            "kl": reference.divergence(logprobs),
            "same": reference.same(logprobs),
            "loss": reference.loss(logprobs) if setting == TEXT else None,
        }

    def _reference(self, setting: str) -> Reference:
        return self._to_text if setting == TEXT else self._to_answer

    @cached_property
    def _to_text(self) -> Reference:
        # The full cache says which token comes first after a piece; that one is fed, and those after it are judged.
        first, *rest = self.piece.following
        return Reference(self.model, [*self._text.tokens, first], rest, self._text.full())

    @cached_property
    def _to_answer(self) -> Reference:
        answer = self._prompt.answer(self.n, self.stops)
        return Reference(self.model, self._prompt.tokens, answer, self._asked.full())

    def _generated(self, policy: AnyPolicy) -> Record:
        """The figures of a policy that reads a prompt for itself."""
        held: Record = {}
        cache = make_prompt_cache(self.model)
        on_report = lambda report: held.update(self._held(cache, report))  # noqa: E731
        given = {"prompt_cache": cache, "on_report": on_report}
        return self._figures(KNOWN, self._to_answer.generated(policy, **given)) | held

    def _reading(self, setting: str) -> Reading:
        """What is compressed."""
        if setting == TEXT:
            return self._text
        return self._prompt if setting == KNOWN else self._asked

    @cached_property
    def _text(self) -> Reading:
        """The piece by itself."""
        if self.frame.start == self.frame.before and set(self.settings) != {TEXT}:
            return self._asked
        tokens = [*self.frame.start, *self.piece.tokens]
        return read_once(self.model, tokens, map(without_lookahead, self.policies))

    @cached_property
    def _asked(self) -> Reading:
        """The piece, where a question comes after it."""
        tokens = [*self.frame.before, *self.piece.tokens]
        policies = [*self.policies, *map(without_lookahead, self.policies)]
        return read_once(self.model, tokens, policies, [self.frame.after])

    @cached_property
    def _prompt(self) -> Reading:
        """The piece with the question."""
        return self._asked.followed_by(self.frame.after)
