"""Measure decoding and prefill at several context lengths, with the contenders taking turns in one process."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import all_caches, kv_bytes, layer_caches
from ..engine.generate import generate_step
from ..engine.loop_model import observing_queries
from ..engine.report import CompressionReport
from ..planning.settings import Setting
from ..planning.units import format_bytes
from .contenders import (
    Contender,
    contenders,
    decoding_cache,
    policy_contenders,
    random_prompt,
)
from .reading import lookahead_of
from .tables import Table

N_WARM_UP = 3  # unmeasured steps at the start
N_ANSWER = 8  # tokens decoded after each prompt

Row = dict[str, Any]


@dataclass(frozen=True)
class BenchPlan:
    """What to measure: lengths, settings and repetitions.

    Attributes:
        contexts: context lengths to measure decoding at.
        prompts: prompt lengths to measure prefill at, for the full cache and all policies.
        trials: number of prompts that each contender reads per length.
        steps: number of tokens that each contender decodes per length.
    """

    contexts: list[int]
    prompts: list[int]
    policies: list[Setting]
    trials: int
    steps: int


def measure_speed(
    model,
    plan: BenchPlan,
    on_start: Callable[[str, int], None],
    on_rows: Callable[[list[Row]], None],
) -> list[Row]:
    """Measure decoding and prefill, and return rows for JSON, one per context length and contender.

    Args:
        model: the mlx-lm model to measure.
        plan: what to measure.
        on_start: called at the start of each phase with its name, "decoding" or "reading", and the number of lengths.
        on_rows: called after each length, with all rows so far.
    """
    rows: dict[tuple[int, str], Row] = {}

    def add(context: int, measured: Iterable[tuple[Contender, dict[str, Any]]]) -> None:
        for contender, figures in measured:
            row = {"context": context, "contender": contender.name, "entries": contender.entries}
            # The row for this length may already contain the decoding speed.
            earlier = rows.get((context, contender.name), {})
            rows[context, contender.name] = row | figures | earlier
        on_rows(list(rows.values()))

    on_start("decoding", len(plan.contexts))
    for n in plan.contexts:
        add(n, measure_decoding(model, n, plan.policies, plan.steps))
    on_start("reading", len(plan.prompts))
    for n in plan.prompts:
        readers = [Contender("full cache", n), *policy_contenders(n, plan.policies)]
        add(n, measure_prefill(model, random_prompt(n), readers, plan.trials))
    return sorted(rows.values(), key=lambda row: row["context"])


def measure_decoding(
    model, context: int, policies: list[Setting], steps: int
) -> list[tuple[Contender, dict[str, Any]]]:
    """Return the contenders that can decode after `context` tokens, with median step time and KV bytes."""
    decoders = []
    caches = []
    for contender in contenders(model, context, policies):
        cache = decoding_cache(model, contender, context)
        if _can_decode(model, cache):
            decoders.append(contender)
            caches.append(cache)
    seconds = step_in_turn(model, caches, steps)
    measured = []
    for contender, cache, times in zip(decoders, caches, seconds):
        figures = {
            "step_seconds": statistics.median(times),
            "kv_bytes": entries_bytes(cache, contender.is_sparse),
        }
        measured.append((contender, figures))
    return measured


def _can_decode(model, cache: list[Any]) -> bool:
    """Run the warm-up steps and return whether they succeed.

    For example, mlx-lm can't decode from quantised entries with attention sinks.
    """
    try:
        with observing_queries(model, cache):
            for _ in range(N_WARM_UP):
                mx.eval(model(mx.zeros((1, 1), mx.int32), cache=cache))
                _trim(cache)
    except (ValueError, AttributeError):
        return False
    return True


def step_in_turn(model, caches: list[list[Any]], steps: int) -> list[list[float]]:
    """Decode `steps` tokens from each of several prompt caches and return each cache's seconds per step.

    The caches take turns, and each round starts with a different cache.
    """
    token = mx.zeros((1, 1), mx.int32)
    turns: deque[tuple[list[Any], list[float]]] = deque((cache, []) for cache in caches)
    seconds = [times for _, times in turns]
    for _ in range(steps):
        for cache, times in turns:
            with observing_queries(model, cache):
                started = time.perf_counter()
                mx.eval(model(token, cache=cache))
                times.append(time.perf_counter() - started)
            _trim(cache)
        turns.rotate(-1)
    return seconds


def _trim(cache: list[Any]) -> None:
    """Trim the last token from mlx-lm's full caches, so that every step reads the same entries."""
    for member in all_caches(cache):
        if member.is_trimmable() and not hasattr(member, "max_size"):
            member.trim(1)


def entries_bytes(prompt_cache: list[Any], is_sparse: bool) -> int:
    """Return the bytes of keys and values in all caches, including rotating ones.

    For sparse attention, this includes the entries that a token reads and all entries that it chooses from.
    """
    caches = layer_caches(prompt_cache)
    if is_sparse:
        return sum(c.kv_nbytes + (c.full_nbytes if c.observes else 0) for c in caches)
    rotating = (c.nbytes for c in all_caches(prompt_cache) if hasattr(c, "max_size"))
    return sum(c.kv_nbytes for c in caches) + sum(rotating)


def measure_prefill(
    model, prompt: mx.array, readers: list[Contender], trials: int
) -> list[tuple[Contender, dict[str, Any]]]:
    """Return each contender with its median figures over `trials` requests.

    The contenders take turns. The order is reversed after every round.
    """
    runs: list[list[dict[str, Any]]] = [[] for _ in readers]
    for trial in range(trials):
        turns = list(zip(readers, runs))
        if trial % 2:
            turns.reverse()
        for contender, own_runs in turns:
            own_runs.append(_measure_request(model, prompt, contender))
    return [(contender, _medians(own_runs)) for contender, own_runs in zip(readers, runs)]


def _medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure over several runs."""
    return {key: statistics.median(run[key] for run in runs) for key in runs[0]}


def _measure_request(model, prompt: mx.array, contender: Contender) -> dict[str, Any]:
    """Answer a prompt, and return the seconds to the first token (with selection), peak memory and KV bytes."""
    cache = make_prompt_cache(model)
    policy = contender.policy
    mx.clear_cache()
    mx.reset_peak_memory()
    lookahead = lookahead_of(policy)
    seconds, report = answer_prompt(model, prompt, cache, lookahead + N_ANSWER, policy=policy)
    # A policy with lookahead selects after the first token.
    seconds += report.selection_seconds if lookahead else 0.0
    peak = mx.get_peak_memory()
    return {"read_seconds": seconds, "peak_bytes": peak, "kv_bytes": kv_bytes(cache)}


def answer_prompt(
    model, prompt: mx.array, cache: list[Any], max_tokens: int, **options: Any
) -> tuple[float, CompressionReport]:
    """Answer a prompt with `generate_step` and return the seconds to the first token and the report.

    Args:
        model: an mlx-lm model.
        prompt: `(T,)` token ids.
        cache: an empty prompt cache, which contains the compressed entries afterwards.
        max_tokens: maximum number of tokens in the answer, at least 1.
        **options: other keywords of `generate_step`.
    """
    reports: list[CompressionReport] = []
    options |= {"prompt_cache": cache, "max_tokens": max_tokens, "on_report": reports.append}
    started = time.perf_counter()
    steps = generate_step(prompt, model, **options)
    next(steps)
    seconds = time.perf_counter() - started
    for _ in steps:
        pass
    return seconds, reports[0]


def speed_table(rows: list[Row]) -> Table:
    """Format the rows of `measure_speed` as a table."""
    table = Table(
        "Decoding and prefill by context length",
        "Decoding: the median step, with the caches taking turns; they hold random entries, since only shapes matter "
        'for speed. Ratios are to the full cache. "Read": seconds from a random prompt to the first token, including '
        "selection, and the peak memory of that. Prompts that the full cache does not read are for policies that evict "
        "during prefill.",
        ["context", "cache", "entries", "tokens/s", "KV memory", "read", "peak memory"],
    )
    full = {row["context"]: row for row in rows if row["contender"] == "full cache"}
    for row in rows:
        base = full.get(row["context"], row)
        decoding = reading = peak = ""  # a row has figures from one measurement or both
        if "step_seconds" in row:
            step = row["step_seconds"]
            decoding = f"{1 / step:.1f}, {base['step_seconds'] / step:.2f}x"
        if "read_seconds" in row:
            reading = f"{row['read_seconds']:.2f} s{_ratio(row, base, 'read_seconds')}"
            peak = f"{format_bytes(row['peak_bytes'])}{_ratio(row, base, 'peak_bytes')}"
        table.add(
            f"{row['context']:,}",
            row["contender"],
            f"{row['entries']:,}",
            decoding,
            format_bytes(row["kv_bytes"]),
            reading,
            peak,
        )
    return table


def _ratio(row: Row, base: Row, figure: str) -> str:
    """Return the ratio to the full cache's figure, such as ", 0.50x", or "" if the full cache lacks the figure."""
    if base["contender"] != "full cache" or figure not in base:
        return ""
    return f", {row[figure] / base[figure]:.2f}x"
