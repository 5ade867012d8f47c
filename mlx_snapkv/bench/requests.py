"""Whole requests: seconds until the first token, peak memory, and the entries that stay."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from ..engine.generate import generate_step
from ..engine.report import CompressionReport
from .contenders import Contender, entries_bytes, request_cache

ANSWER = 8  # tokens decoded after each prompt
VOCABULARY = 100  # token ids that every model has


def measure_requests(
    model, prompt: mx.array, field: list[Contender], trials: int, on_trial: Callable[[], None]
) -> list[dict[str, Any]]:
    """One record a contender: medians over its requests, made in turn; who goes first alternates.

    The full cache and SnapKV, whose ratio matters, make `trials` requests each, the others one.
    """
    runs: dict[str, list[dict[str, Any]]] = {c.name: [] for c in field}
    for trial in range(trials):
        for contender in field if trial % 2 == 0 else reversed(field):
            if trial < n_trials(contender, trials):
                runs[contender.name].append(_request(model, prompt, contender))
                on_trial()
    return [_summary(contender, prompt.size, runs[contender.name]) for contender in field]


def random_prompt(n_tokens: int) -> mx.array:
    """`(n_tokens,)` token ids."""
    prompt = mx.random.randint(1, VOCABULARY, (n_tokens,))
    mx.eval(prompt)
    return prompt


def n_trials(contender: Contender, trials: int) -> int:
    return trials if contender.kind in ("full", "snapkv") else 1


def _request(model, prompt: mx.array, contender: Contender) -> dict[str, Any]:
    cache = request_cache(model, contender)
    reports: list[CompressionReport] = []
    mx.clear_cache()
    mx.reset_peak_memory()
    started = time.perf_counter()
    options = {"max_tokens": ANSWER, "prompt_cache": cache, **contender.options}
    steps = generate_step(prompt, model, on_report=reports.append, **options)
    next(steps)
    first = time.perf_counter() - started
    for _ in steps:
        pass
    report = reports[0]
    if report.compressed:
        # With a lookahead the compression comes some tokens later, but it is part of reading the prompt.
        first = report.prefill_seconds + report.selection_seconds
    return {
        "prefill_seconds": first,
        "selection_seconds": report.selection_seconds,
        "peak_bytes": mx.get_peak_memory(),
        "kv_bytes": entries_bytes(cache),
    }


def _summary(contender: Contender, context: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    return contender.record(context, trials=len(runs), **medians)
