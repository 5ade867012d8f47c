"""Decoding and reading by context length: the contenders in turn, in one process."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import kv_bytes, layer_caches, members
from ..engine.generate import generate_step
from ..engine.loop_model import observing
from ..engine.report import CompressionReport
from ..planning.settings import Setting
from ..planning.units import format_bytes
from .contenders import Contender, compressed, contenders, decoding_cache, random_prompt
from .reading import n_ahead
from .tables import Table

WARM_UP = 3
ANSWER = 8  # tokens decoded after each prompt

Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    contexts: list[int]  # lengths to decode `steps` tokens at
    prompts: list[int]  # lengths to read with the full cache and all policies, `trials` of each
    policies: list[Setting]
    trials: int
    steps: int


def measure_speed(
    model, plan: Plan, start: Callable[[str, int], None], done: Callable[[list[Row]], None]
) -> list[Row]:
    """A row for each context length and contender, as the benchmark's JSON file has them.

    Args:
        start: called with what is measured and in how many parts.
        done: called after every part, with all rows so far.
    """
    rows: dict[tuple[int, str], Row] = {}

    def add(context: int, found: Iterable[tuple[Contender, dict[str, Any]]]) -> None:
        for contender, figures in found:
            row = {"context": context, "contender": contender.name, "entries": contender.entries}
            rows[context, contender.name] = row | figures | rows.get((context, contender.name), {})
        done(list(rows.values()))

    start("decoding", len(plan.contexts))
    for n in plan.contexts:
        add(n, decoding(model, n, plan.policies, plan.steps))
    start("reading", len(plan.prompts))
    for n in plan.prompts:
        readers = [Contender("full cache", n), *compressed(n, plan.policies)]
        add(n, reading(model, random_prompt(n), readers, plan.trials))
    return sorted(rows.values(), key=lambda row: row["context"])


def decoding(
    model, context: int, policies: list[Setting], steps: int
) -> list[tuple[Contender, dict[str, Any]]]:
    """The contenders with their median step after a prompt of `context` tokens, and their entries' bytes."""
    held = [(c, decoding_cache(model, c, context)) for c in contenders(model, context, policies)]
    held = [(contender, cache) for contender, cache in held if _can_decode(model, cache)]
    seconds = step_in_turn(model, [cache for _, cache in held], steps)
    figures = []
    for (contender, cache), times in zip(held, seconds):
        n_bytes = entries_bytes(cache, contender.is_sparse)
        figures.append((contender, {"step_seconds": statistics.median(times), "kv_bytes": n_bytes}))
    return figures


def _can_decode(model, cache: list[Any]) -> bool:
    """False where mlx-lm can't serve a model from such a cache (quantised entries with attention sinks)."""
    try:
        with observing(model, cache):
            for _ in range(WARM_UP):
                mx.eval(model(mx.zeros((1, 1), mx.int32), cache=cache))
                _trim(cache)
    except (ValueError, AttributeError):
        return False
    return True


def step_in_turn(model, caches: list[list[Any]], steps: int) -> list[list[float]]:
    """Seconds of every step of every cache; who goes first changes with every round."""
    token = mx.zeros((1, 1), mx.int32)
    turns: deque[tuple[list[Any], list[float]]] = deque((cache, []) for cache in caches)
    seconds = [times for _, times in turns]
    for _ in range(steps):
        for cache, times in turns:
            with observing(model, cache):
                started = time.perf_counter()
                mx.eval(model(token, cache=cache))
                times.append(time.perf_counter() - started)
            _trim(cache)
        turns.rotate(-1)
    return seconds


def _trim(cache: list[Any]) -> None:
    """Undo the growth of mlx-lm's full caches, so that every step is one over the same entries."""
    for member in members(cache):
        if member.is_trimmable() and not hasattr(member, "max_size"):
            member.trim(1)


def entries_bytes(prompt_cache: list[Any], is_sparse: bool) -> int:
    """Bytes of the keys and values of all caches, also rotating ones, and of all that sparse attention chooses from."""
    caches = layer_caches(prompt_cache)
    if is_sparse:
        return sum(c.kv_nbytes + (c.full_nbytes if c.observes else 0) for c in caches)
    rotating = (c.nbytes for c in members(prompt_cache) if hasattr(c, "max_size"))
    return sum(c.kv_nbytes for c in caches) + sum(rotating)


def reading(
    model, prompt: mx.array, field: list[Contender], trials: int
) -> list[tuple[Contender, dict[str, Any]]]:
    """The contenders with medians over their requests, made in turn; who goes first alternates."""
    runs: list[list[dict[str, Any]]] = [[] for _ in field]
    for trial in range(trials):
        for contender, mine in list(zip(field, runs))[:: -1 if trial % 2 else 1]:
            mine.append(_request(model, prompt, contender))
    return [
        (contender, {key: statistics.median(run[key] for run in mine) for key in mine[0]})
        for contender, mine in zip(field, runs)
    ]


def _request(model, prompt: mx.array, contender: Contender) -> dict[str, Any]:
    """Seconds until the answer's first token, the selection included, peak memory, and the entries that stay."""
    cache, policy = make_prompt_cache(model), contender.policy
    mx.clear_cache()
    mx.reset_peak_memory()
    lookahead = n_ahead(policy)
    seconds, report = ask(model, prompt, cache, lookahead + ANSWER, policy=policy)
    seconds += report.selection_seconds if lookahead else 0.0
    peak = mx.get_peak_memory()
    return {"read_seconds": seconds, "peak_bytes": peak, "kv_bytes": kv_bytes(cache)}


def ask(
    model, prompt: mx.array, cache: list[Any], max_tokens: int, **options: Any
) -> tuple[float, CompressionReport]:
    """Seconds until the first token of an answer, and the report."""
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
    """Return a table of `measure_speed`'s rows, a line for each context length and contender."""
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
        step, read = row.get("step_seconds"), row.get("read_seconds")
        table.add(
            f"{row['context']:,}",
            row["contender"],
            f"{row['entries']:,}",
            f"{1 / step:.1f}, {base['step_seconds'] / step:.2f}x" if step else "",
            format_bytes(row["kv_bytes"]),
            f"{read:.2f} s" + _ratio(row, base, "read_seconds") if read else "",
            format_bytes(row["peak_bytes"]) + _ratio(row, base, "peak_bytes") if read else "",
        )
    return table


def _ratio(row: Row, base: Row, figure: str) -> str:
    known = base["contender"] == "full cache" and figure in base
    return f", {row[figure] / base[figure]:.2f}x" if known else ""
