"""All measurements of one model, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from .. import models
from ..policies import Policy
from .decode import measure_decoding, requesters
from .needle import measure_needles
from .requests import measure_requests, n_trials


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        contexts: context lengths to decode at.
        batches, batch_context: batch sizes to decode with, and their context length.
        prompts: lengths of whole requests, and of the documents asked about.
        trials: requests with the full cache and with SnapKV; steps: decoded per cache.
        questions: facts to ask for in every document; 0 is none.
        policy_for: SnapKV's options at a context length.
    """

    contexts: list[int]
    batches: list[int]
    batch_context: int
    prompts: list[int]
    trials: int
    steps: int
    questions: int
    policy_for: Callable[[int], Policy]


class Progress(Protocol):
    """Told what is being measured, in how many parts, of every part done, and of all records so far."""

    def start(self, what: str, parts: int) -> None: ...

    def advance(self) -> None: ...

    def save(self, result: dict[str, list[dict[str, Any]]]) -> None: ...


def run(model, tokenizer, plan: Plan, progress: Progress) -> dict[str, list[dict[str, Any]]]:
    """The records of every measurement, by its name.

    Raises:
        UnsupportedModelError: the model can't be compressed.
    """
    models.attention_layers(model, make_prompt_cache(model))
    result: dict[str, list[dict[str, Any]]] = {
        "decode": [],
        "batch": [],
        "requests": [],
        "needle": [],
    }
    progress.start("decoding", len(plan.contexts))
    for n in plan.contexts:
        result["decode"] += measure_decoding(model, n, 1, plan.policy_for(n), plan.steps)
        progress.advance()
        progress.save(result)
    progress.start("decoding in batches", len(plan.batches))
    for size in plan.batches:
        policy = plan.policy_for(plan.batch_context)
        result["batch"] += measure_decoding(model, plan.batch_context, size, policy, plan.steps)
        progress.advance()
        progress.save(result)
    fields = {n: requesters(model, n, plan.policy_for(n)) for n in plan.prompts}
    trials = (n_trials(c, plan.trials) for field in fields.values() for c in field)
    progress.start("whole requests", sum(trials))
    for n, field in fields.items():
        prompt = mx.random.randint(1, 256, (n,))
        result["requests"] += measure_requests(model, prompt, field, plan.trials, progress.advance)
        progress.save(result)
    if plan.questions:
        progress.start("questions", plan.questions * sum(map(len, fields.values())))
        for n in plan.prompts:
            result["needle"] += measure_needles(
                model, tokenizer, n, plan.policy_for, plan.questions, progress.advance
            )
            progress.save(result)
    return result
