"""All measurements of one model, one after the other."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from mlx_lm.models.cache import make_prompt_cache

from ..batch.batchable import require_together
from ..caches.layers import attention_layers
from ..policies import KeyDiff, Policy
from .batches import batch_field, measure_batch
from .book import book_field, measure_book
from .contenders import bounded_field
from .decode import measure_decoding, requesters
from .needle import measure_needles
from .requests import measure_requests, n_trials, random_prompt
from .verified import measure_verified

BOUNDED = KeyDiff(budget=2048, block=512)

PARTS = ("decode", "verified", "requests", "bounded", "book", "batches", "server", "needle")

Result = dict[str, list[dict[str, Any]]]


@dataclass(frozen=True)
class Plan:
    """What to measure.

    Attributes:
        contexts: context lengths to decode at.
        prompts: lengths of whole requests, and of the documents asked about.
        trials: requests with the full cache and with SnapKV; steps: decoded per cache.
        questions: facts to ask for in every document; 0 is none.
        policy_for: SnapKV's options at a context length.
        verified: context lengths at which verified answers are decoded.
        long_prompts: lengths of prompts that are read within a fixed budget, the first one with the full cache too.
        books: lengths of prompts that are read once and asked several questions.
        batches, batch_prompts: how many prompts are answered at once, and their lengths.
    """

    contexts: list[int]
    prompts: list[int]
    trials: int
    steps: int
    questions: int
    policy_for: Callable[[int], Policy]
    verified: list[int] = field(default_factory=list)
    long_prompts: list[int] = field(default_factory=list)
    books: list[int] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    batch_prompts: list[int] = field(default_factory=list)


class Progress(Protocol):
    """Told what is being measured, in how many parts, of every part done, and of all records so far."""

    def start(self, what: str, parts: int) -> None: ...

    def advance(self) -> None: ...

    def save(self, result: Result) -> None: ...


def run(model, tokenizer, plan: Plan, progress: Progress) -> Result:
    """The records of every measurement, by its name.

    Raises:
        UnsupportedModelError: the model can't be compressed, or batched.
    """
    attention_layers(model, make_prompt_cache(model))
    if plan.batches:
        require_together(model)
    result: Result = {part: [] for part in PARTS}
    progress.start("decoding", len(plan.contexts))
    for n in plan.contexts:
        result["decode"] += measure_decoding(model, n, plan.policy_for(n), plan.steps)
        progress.advance()
        progress.save(result)
    progress.start("verified answers", len(plan.verified))
    for n in plan.verified:
        result["verified"] += measure_verified(model, n, plan.policy_for(n), plan.steps)
        progress.advance()
        progress.save(result)
    _measure_requests(model, plan, progress, result)
    _measure_bounded(model, plan, progress, result)
    _measure_books(model, plan, progress, result)
    _measure_batches(model, plan, progress, result)
    if plan.questions:
        asked = sum(len(requesters(model, n, plan.policy_for(n))) for n in plan.prompts)
        progress.start("questions", plan.questions * asked)
        for n in plan.prompts:
            result["needle"] += measure_needles(
                model, tokenizer, n, plan.policy_for, plan.questions, progress.advance
            )
            progress.save(result)
    return result


def _measure_requests(model, plan: Plan, progress: Progress, result: Result) -> None:
    fields = {n: requesters(model, n, plan.policy_for(n)) for n in plan.prompts}
    for n in plan.prompts[1:]:
        # A prompt is read into quantised entries many times slower: once is enough to see it.
        fields[n] = [c for c in fields[n] if c.kind != "quantized"]
    trials = (n_trials(c, plan.trials) for found in fields.values() for c in found)
    progress.start("whole requests", sum(trials))
    for n, found in fields.items():
        prompt = random_prompt(n)
        result["requests"] += measure_requests(model, prompt, found, plan.trials, progress.advance)
        progress.save(result)


def _measure_bounded(model, plan: Plan, progress: Progress, result: Result) -> None:
    if plan.long_prompts:
        progress.start("within a budget", len(plan.long_prompts) + 1)
    for n in plan.long_prompts:
        found = bounded_field(n, BOUNDED, with_full=n == plan.long_prompts[0])
        prompt = random_prompt(n)
        result["bounded"] += measure_requests(model, prompt, found, 1, progress.advance)
        progress.save(result)


def _measure_books(model, plan: Plan, progress: Progress, result: Result) -> None:
    field = book_field(plan.books)
    if field:
        progress.start("books", len(field))
    for n, contender in field:
        result["book"].append(measure_book(model, n, contender))
        progress.advance()
        progress.save(result)


def _measure_batches(model, plan: Plan, progress: Progress, result: Result) -> None:
    found = [
        (n, batch, contender)
        for n in plan.batch_prompts
        for batch in plan.batches
        for contender in batch_field(model, n, plan.policy_for(n))
    ]
    if found:
        progress.start("batches", len(found))
    for n, batch, contender in found:
        result["batches"].append(measure_batch(model, n, batch, contender, plan.steps))
        progress.advance()
        progress.save(result)
