"""Asking every question with the full cache and with each policy."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import attention_layers, kv_bytes
from ..demo.questions import contains
from ..engine.decision import gate
from ..engine.generate import generate
from ..engine.report import CompressionReport
from ..errors import SnapKVError
from ..policies import Policy, Stages, resolve_policy
from .grid import Cell, Question, Task
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
) -> list[Record]:
    """Ask what `results` does not hold yet; the records of all cells and contenders, in that order.

    `generation` holds options of `generate` for every answer, the full cache's too.
    """
    for cell in cells:
        missing = [
            name for name in contenders if results.get({"policy": name, **vars(cell)}) is None
        ]
        if not missing:
            continue
        question = task.ask(cell)
        for name in missing:
            options = {"policy": contenders[name], **generation}
            answered = _answer(model, tokenizer, question, options)
            results.add({"policy": name, **vars(cell), **answered})
            on_answer()
    return [
        record
        for cell in cells
        for name in contenders
        if (record := results.get({"policy": name, **vars(cell)}))
    ]


def _answer(model, tokenizer, question: Question, options: dict[str, Any]) -> dict[str, Any]:
    reports: list[CompressionReport] = []
    cache = make_prompt_cache(model)
    options |= {"prompt_cache": cache, "on_report": reports.append}
    text = generate(model, tokenizer, question.prompt, max_tokens=MAX_TOKENS, **options)
    (report,) = reports
    return {
        "right": contains(text, question.expected),
        "answer": text.strip(),
        "expected": question.expected,
        "prompt_tokens": len(question.prompt),
        "entries": report.entries if report.compressed else len(question.prompt),
        "kv_bytes": kv_bytes(cache),
        "reason": report.reason if options["policy"] is not None else None,
    }
