"""Asking every question with the full cache and with each policy."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import attention_layers
from ..demo.questions import contains
from ..engine.decision import gate
from ..errors import SnapKVError
from ..policies import Policy, Stages, resolve_policy
from .answers import answers
from .grid import Cell, Question, Task
from .prompt import Answer, Prompt
from .results import Record, Results

FULL = "full cache"
MAX_TOKENS = 24  # of an answer

Contenders = Mapping[str, Policy | Stages | None]


def contenders(policies: Sequence[str]) -> dict[str, Policy | Stages | None]:
    """The full cache, then the policies, by the names that records and tables give them."""
    chosen = [resolve_policy(policy=text) for text in policies]
    return {FULL: None} | {str(policy): policy for policy in chosen}


def check(model, contenders: Contenders, lengths: Sequence[int]) -> None:
    """Find mistakes before anything is measured.

    Raises:
        SnapKVError: the model is not supported, a budget has no room for what is always kept, or a policy would
            leave the prompts of all lengths as they are.
    """
    compressing = {name: policy for name, policy in contenders.items() if policy is not None}
    if not compressing:
        return
    n_layers = len(attention_layers(model, make_prompt_cache(model)))
    for name, policy in compressing.items():
        reasons = [gate(policy, length, None, MAX_TOKENS) for length in lengths]
        for length, reason in zip(lengths, reasons):
            if reason is None:
                policy.prefill_quotas(length, n_layers)
        if all(reasons):
            raise SnapKVError(f"{name} would compress nothing here: {reasons[-1]}")


def run(
    model,
    tokenizer,
    task: Task,
    cells: Sequence[Cell],
    contenders: Contenders,
    results: Results,
    on_answer: Callable[[], None] = lambda: None,
    generation: Mapping[str, Any] = MappingProxyType({}),
    batch_size: int = 1,
) -> list[Record]:
    """Ask what `results` does not hold yet; the records of all cells and contenders, in that order.

    `generation` holds options of `generate` for every answer, the full cache's too; with any, answers are given one at
    a time whatever `batch_size` is.
    """

    def place(name: str, cell: Cell) -> Record:
        return {"policy": name, **vars(cell)}

    for start in range(0, len(cells), batch_size):
        some = cells[start : start + batch_size]
        missing = {
            name: [cell for cell in some if results.get(place(name, cell)) is None]
            for name in contenders
        }
        wanted = {cell for own in missing.values() for cell in own}
        questions = {cell: task.ask(cell) for cell in some if cell in wanted}
        for name, own in missing.items():
            prompts = [(cell, Prompt(questions[cell].prompt, MAX_TOKENS)) for cell in own]
            policy = contenders[name]
            found = answers(model, tokenizer, prompts, policy, generation, batch_size)
            for cell, answer in found:
                results.add(place(name, cell) | _told(questions[cell], policy, answer))
                on_answer()
    return [
        record
        for cell in cells
        for name in contenders
        if (record := results.get(place(name, cell)))
    ]


def _told(question: Question, policy: Policy | Stages | None, answer: Answer) -> dict[str, Any]:
    report = answer.report
    return {
        "right": contains(answer.text, question.expected),
        "answer": answer.text.strip(),
        "expected": question.expected,
        "prompt_tokens": len(question.prompt),
        "entries": report.entries if report.compressed else len(question.prompt),
        "kv_bytes": answer.kv_bytes(report),
        "reason": None if policy is None else report.reason,
    }
