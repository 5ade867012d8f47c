"""Asking questions about documents, in two settings: the one loop of all evaluations that score answers.

known   the question stands in the prompt that is compressed: the policy may look at it
later   the document is read and compressed first, and each question comes to what is left
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import attention_layers, file_bytes, kv_bytes
from ..engine.decision import gate
from ..errors import SnapKVError
from .answering import KNOWN, Answer, Asked, Method
from .document import Dataset, Question
from .results import Record, Results


def run(
    model,
    dataset: Dataset,
    methods: Sequence[Method],
    settings: Sequence[str],
    results: Results,
    on_document: Callable[[bool], None] = lambda asked: None,
) -> list[Record]:
    """Ask what `results` does not hold yet; all records.

    Args:
        on_document: called after each document, told whether anything was asked about it.
    """
    records = []
    for place, document in dataset:
        cells = [
            (
                method,
                setting,
                i,
                {"method": method.name, "setting": setting, **place, "question": i},
            )
            for method in methods
            for setting in settings
            for i in range(len(document.questions))
        ]
        missing = [cell for cell in cells if results.get(cell[-1]) is None]
        # All answers to a prompt, then the next prompt; of documents, all answers of a method.
        missing.sort(key=lambda cell: (settings.index(cell[1]), cell[2] if cell[1] == KNOWN else 0))
        asked = Asked(model, dataset.tokenizer, document, [cell[:3] for cell in missing])
        for method, setting, i, where in missing:
            question = document.questions[i]
            answer = asked.answer(method, setting, question)
            results.add(where | _told(question, method, answer))
        on_document(bool(missing))
        records += [record for *_, where in cells if (record := results.get(where))]
    return records


def require_compression(model, methods: Sequence[Method], lengths: Sequence[int]) -> None:
    """Find mistakes before anything is asked.

    Raises:
        SnapKVError: the model is not supported, a budget has no room for what is always kept, or a policy would leave
            the prompts of all lengths as they are.
    """
    n_layers = len(attention_layers(model, make_prompt_cache(model)))
    for method in methods:
        policy = method.scores
        if policy is None or not lengths:
            continue
        reasons = [gate(policy, length, None) for length in lengths]
        if all(reasons):
            raise SnapKVError(f"{method.name} would compress nothing here: {reasons[-1]}")
        for length, reason in zip(lengths, reasons):
            if reason is None:
                policy.prefill_quotas(length, n_layers)


def _told(question: Question, method: Method, answer: Answer) -> Record:
    """What is recorded of an answer."""
    report, n_bytes = answer.report, kv_bytes(answer.cache)
    if report.compressed:
        # With a memory the cache that was given holds all entries, and the answer's own is another.
        recalls = method.options.get("memory", "drop") != "drop"
        n_bytes = report.kv_bytes_after + (n_bytes if recalls else 0)
    return {
        "score": float(question.score(answer.text)),
        "answer": answer.text,
        "expected": question.expected,
        "tokens": len(question.prompt),
        "entries": report.entries if report.compressed else None,
        "kv_bytes": n_bytes,
        "file_bytes": file_bytes(answer.cache),
        "reason": None if method.policy is None else report.reason,
    }
