"""How far a model's predictions move when what came before them is compressed.

text    a text goes on, compressed where a piece of it ends: all tokens judged are read from what is left
known   a question stands behind the piece, and the policy sees it: judged is the full cache's own greedy answer
later   the piece is compressed first, and the question comes to what is left: the same answer is judged
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import attention_layers
from ..engine.decision import gate
from ..engine.generate import generate_step
from ..engine.report import NO_POLICY, CompressionReport
from ..engine.request import held_tokens
from ..entries.quantization import n_bytes
from ..errors import SnapKVError
from ..policies import Policy, Stages
from .beside import Beside
from .divergence import Reference, log_softmax, loss
from .frame import Frame, frame_of
from .reading import Reading, judged, read_once, shares_reading
from .results import Record, Results
from .texts import Piece

TEXT, KNOWN, LATER = "text", "known", "later"
SETTINGS = (TEXT, KNOWN, LATER)
FULL = "full cache"
KEYS = ("method", "setting", "document", "piece")

AnyPolicy = Policy | Stages
Methods = Mapping[str, AnyPolicy | None]


def require_compression(methods: Methods, length: int) -> None:
    """Raises: SnapKVError: a policy would leave prompts of so many tokens as they are."""
    for name, policy in methods.items():
        reason = None if policy is None else gate(policy, length, None)
        if reason is not None:
            raise SnapKVError(f"{name} would compress nothing here: {reason}")


def require_room(model: Any, methods: Methods, length: int) -> None:
    """Raises: SnapKVError: the model is not supported, or a layer's budget has no room for what is always kept."""
    n_layers = len(attention_layers(model, make_prompt_cache(model)))
    for policy in methods.values():
        if policy is not None:
            policy.prefill_quotas(length, n_layers)


def without_answer(policy: AnyPolicy) -> AnyPolicy:
    """The policy for a text that nothing answers: it does not look ahead."""
    if isinstance(policy, Stages):
        chooses: Any = without_answer(policy.decode_policy)
        return dataclasses.replace(policy, decode_policy=chooses)
    return dataclasses.replace(policy, lookahead=0) if policy.n_lookahead else policy  # type: ignore[call-arg]


@dataclass
class Document:
    """A piece of a text, which is read once for all that it is judged for.

    Args:
        frame: what stands around the piece.
        policies: all that will be compared.
        settings: those they will be compared in.
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
            return self._full(setting)
        if setting == KNOWN and not shares_reading(policy):
            return self._generated(policy)
        if setting == KNOWN:
            cache, report = self._prompt.answering(policy)
        else:
            cache, report = self._reading(setting).compressed(without_answer(policy))
        held = self._held(cache, report)
        with mx.stream(stream):
            return self._figures(setting, self._judged(setting, cache)) | held

    def _full(self, setting: str) -> Record:
        reading = self._reading(setting)
        report = CompressionReport(NO_POLICY, len(reading.tokens))
        figures = self._figures(setting, self._reference(setting).logprobs)
        return figures | self._held(reading.full(), report) | {"kl": 0.0}

    def _held(self, cache: list, report: CompressionReport) -> Record:
        """What a cache holds once it is compressed: entries, the mean over layers, and their bytes."""
        held = [layer.entries_in(cache).held() for layer in attention_layers(self.model, cache)]
        nbytes = sum(n_bytes((e.stored_keys, e.stored_values)) for e in held)
        kept = [n for n in report.entries_kept if n is not None]
        return {
            "entries": round(sum(kept) / len(kept)) if kept else report.prompt_tokens,
            "kv_bytes": nbytes,
            "reason": report.reason,
        }

    def _figures(self, setting: str, logprobs: mx.array) -> Record:
        """Means over the tokens judged, of which a cache was asked for the last ones: the others are as they were."""
        reference, n_asked = self._reference(setting), len(logprobs)
        n = len(reference)
        return {
            "tokens": n,
            "judged": n_asked,
            "kl": reference.divergence(logprobs).sum() / n if n_asked else 0.0,
            "same": 1 - reference.differs(logprobs).sum() / n if n_asked else 1.0,
            "loss": loss(logprobs, self.piece.following[1:]) if setting == TEXT else None,
        }

    def _reference(self, setting: str) -> Reference:
        return self._to_text if setting == TEXT else self._to_answer

    @cached_property
    def _to_text(self) -> Reference:
        return Reference(self._judged(TEXT, self._text.full()))

    @cached_property
    def _to_answer(self) -> Reference:
        return Reference(self._judged(LATER, self._asked.full()))

    def _judged(self, setting: str, cache: list) -> mx.array:
        """Log-probabilities for those tokens that a cache is asked for: all, or the last ones of an answer."""
        known = self._known(setting)[held_tokens(self.model, cache) : -1]
        if not known:
            return self._prompt.following[None][:0]
        return log_softmax(judged(self.model, cache, known)[-self._n_judged(setting) :])

    def _known(self, setting: str) -> list[int]:
        """The prompt and what comes after it."""
        if setting == TEXT:
            return [*self._text.tokens, *self.piece.following]
        return [*self._prompt.tokens, *self._answer]

    def _n_judged(self, setting: str) -> int:
        # The full cache says which token comes first after a piece; that one is fed, and those after it are judged.
        return len(self.piece.following) - 1 if setting == TEXT else len(self._answer)

    def _generated(self, policy: AnyPolicy) -> Record:
        """The figures of a policy that reads a prompt for itself: `generate_step` is told what to answer."""
        held: Record = {}
        cache, answer = make_prompt_cache(self.model), iter(self._answer)
        steps = generate_step(
            mx.array(self._prompt.tokens),
            self.model,
            policy=policy,
            prompt_cache=cache,
            max_tokens=len(self._answer),
            sampler=lambda logprobs: mx.array([next(answer, 0)]),
            on_report=lambda report: held.update(self._held(cache, report)),
        )
        logprobs = mx.stack([one for _, one in steps])
        return self._figures(KNOWN, log_softmax(logprobs)) | held

    def _reading(self, setting: str) -> Reading:
        """What is compressed."""
        if setting == TEXT:
            return self._text
        return self._prompt if setting == KNOWN else self._asked

    @cached_property
    def _text(self) -> Reading:
        """The piece by itself."""
        alike = self.frame.start == self.frame.before and self.settings != {TEXT}
        tokens = [*self.frame.start, *self.piece.tokens]
        plain = map(without_answer, self.policies)
        return self._asked if alike else read_once(self.model, tokens, plain)

    @cached_property
    def _asked(self) -> Reading:
        """The piece, where a question comes after it."""
        tokens = [*self.frame.before, *self.piece.tokens]
        policies = [*self.policies, *map(without_answer, self.policies)]
        return read_once(self.model, tokens, policies, [self.frame.after])

    @cached_property
    def _prompt(self) -> Reading:
        """The piece with the question."""
        return self._asked.followed_by(self.frame.after)

    @cached_property
    def _answer(self) -> list[int]:
        return self._prompt.answer(self.n, self.stops)


@dataclass(frozen=True)
class Comparison:
    """What is judged, and of whom.

    Attributes:
        questions: each piece is asked one of them, in turn, where it is asked any.
        n: tokens of an answer, at most.
    """

    pieces: Sequence[Piece]
    methods: Methods
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
    """Judge what `results` does not hold yet; the records of all pieces, settings and methods.

    `on_piece` is called after each piece, and told whether any of it was measured.
    """
    methods, settings = comparison.methods, comparison.settings
    asked = [None] if set(settings) == {TEXT} else comparison.questions
    framed = [(question, frame_of(tokenizer, question)) for question in asked]
    beside = Beside(results.add)
    every: list[Record] = []
    measured = False
    for piece, (question, frame) in zip(comparison.pieces, itertools.cycle(framed)):
        place = {"document": piece.document, "piece": piece.number}
        places: list[Record] = [
            {"method": name, "setting": s, **place} for s in settings for name in methods
        ]
        missing = [wanted for wanted in places if results.get(wanted) is None]
        policies = [p for wanted in missing if (p := methods[wanted["method"]]) is not None]
        stops = tokenizer.eos_token_ids
        of_piece = {wanted["setting"] for wanted in missing}
        document = Document(model, piece, frame, policies, of_piece, comparison.n, stops)
        document.read()
        beside.finish()
        for wanted in missing:
            setting, policy = wanted["setting"], methods[wanted["method"]]
            wanted["question"] = None if setting == TEXT else question
            beside.add(wanted | document.judge(setting, policy, beside.next_stream()))
        beside.then(functools.partial(on_piece, bool(missing)))
        if missing and not measured:
            beside.finish()  # the first tells how long the others will take
        measured |= bool(missing)
        every += places
    beside.finish()
    return [results.get(wanted) for wanted in every]  # type: ignore[misc]  # all were added
