"""How far a model's predictions move when what came before them is compressed.

text    a text goes on, compressed where a piece of it ends: all tokens judged are read from what is left
known   a question stands behind the piece, and the policy sees it: judged is the full cache's own greedy answer
later   the piece is compressed first, and the question comes to what is left: the same answer is judged
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from statistics import fmean
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import attention_layers
from ..engine.report import NO_POLICY, CompressionReport
from ..entries.quantization import n_bytes
from ..policies import Stages
from . import loop
from .divergence import Reference
from .loop import Record, Results
from .methods import KNOWN, LATER, Method
from .reading import AnyPolicy, Reading, read_once, shares_reading
from .texts import Frame, Piece, frame_of

TEXT = "text"
SETTINGS = (TEXT, KNOWN, LATER)


def run(
    model: Any,
    tokenizer: Any,
    pieces: Sequence[Piece],
    methods: Sequence[Method],
    settings: Sequence[str],
    questions: Sequence[str],
    n: int,
    results: Results,
    on_piece: Callable[[bool], None] = lambda measured: None,
) -> list[Record]:
    """The records of all pieces, settings and methods; see `loop.run`.

    Args:
        questions: each piece is asked one of them, in turn, where it is asked any.
        n: tokens of an answer, at most.
    """
    policies = {method.name: method.policy for method in methods}
    asked = [None] if set(settings) == {TEXT} else questions
    framed = [(question, frame_of(tokenizer, question)) for question in asked]

    def document(piece: Piece, question: str | None, frame: Frame):
        def measure(missing: list[Record]) -> Iterable[Record]:
            own = [policies[cell["method"]] for cell in missing]
            wanted = {cell["setting"] for cell in missing}
            read = read_piece(model, piece, frame, own, wanted, n, tokenizer.eos_token_ids)
            for cell in missing:
                setting, policy = cell["setting"], policies[cell["method"]]
                yield cell | judge(setting, *read[setting], policy, loop.next_stream())

        place = {"document": piece.document, "piece": piece.number}
        pairs = itertools.product(settings, policies)
        asked = {setting: None if setting == TEXT else question for setting in settings}
        cells = [{"method": m, "setting": s, **place, "question": asked[s]} for s, m in pairs]
        return cells, measure

    each = (document(piece, *frame) for piece, frame in zip(pieces, itertools.cycle(framed)))
    return loop.run(each, results, on_piece)


def without_lookahead(policy: Any) -> Any:
    """The policy for a text that nothing answers."""
    if isinstance(policy, Stages):
        return dataclasses.replace(policy, decode_policy=without_lookahead(policy.decode_policy))
    return dataclasses.replace(policy, lookahead=0) if policy and policy.lookahead else policy


def read_piece(
    model: Any,
    piece: Piece,
    frame: Frame,
    policies: Sequence[AnyPolicy | None],
    settings: Collection[str],
    n: int,
    stops: Collection[int],
) -> dict[str, tuple[Reading, Reference]]:
    """By setting, what is compressed, read once for all policies, and what is judged.

    Args:
        n: tokens of an answer, at most; `stops` end it.
    """
    found: dict[str, tuple[Reading, Reference]] = {}
    bare = [without_lookahead(policy) for policy in policies]
    text = None
    if set(settings) != {TEXT}:
        tokens = [*frame.before, *piece.tokens]
        asked = read_once(model, tokens, [*policies, *bare], [frame.after])
        prompt = asked.followed_by(frame.after)
        answer = Reference(prompt, prompt.answer(n, stops))
        found |= {KNOWN: (prompt, answer), LATER: (asked, answer)}
        text = asked if frame.start == frame.before else None
    if TEXT in settings:
        text = text or read_once(model, [*frame.start, *piece.tokens], bare)
        # The full cache says which token comes first after a piece; it is fed, and those after it are judged.
        found[TEXT] = text, Reference(text, piece.following, n_fed=1)
    for _, reference in found.values():
        reference.logprobs  # noqa: B018  # computed now, and not by the stream of whoever asks first
    return found


def judge(
    setting: str, reading: Reading, reference: Reference, policy: AnyPolicy | None, stream: Any
) -> Record:
    """A policy's figures, or the full cache's; some of them are arrays that `stream` has to compute."""
    known = setting == KNOWN
    held: Record = {}
    if known and not shares_reading(policy):
        cache = make_prompt_cache(reading.model)
        on_report = lambda report: held.update(_held(reading, cache, report))  # noqa: E731
        predictions = reference.generated(policy, prompt_cache=cache, on_report=on_report)
    else:
        chosen = policy if known else without_lookahead(policy)
        cache, report = reading.compressed(chosen, answering=known)
        held = _held(reading, cache, report)
        predictions = None
    with mx.stream(stream):
        if predictions is None:
            predictions = reference.predictions(cache) if policy else reference.logprobs
        figures = reference.figures(predictions)
        loss = reference.loss(predictions) if setting == TEXT else None
    counts = {"tokens": len(reference), "judged": len(predictions)}
    return counts | figures | {"loss": loss} | held


def _held(reading: Reading, cache: list, report: CompressionReport) -> Record:
    """What a cache holds once it is compressed: entries, the mean over layers, and their bytes."""
    held = [layer.entries_in(cache).held() for layer in attention_layers(reading.model, cache)]
    kept = [n for n in report.entries_kept if n is not None]
    return {
        "entries": round(fmean(kept)) if kept else report.prompt_tokens,
        "kv_bytes": sum(n_bytes((e.stored_keys, e.stored_values)) for e in held),
        "reason": None if report.policy == NO_POLICY else report.reason,
    }
