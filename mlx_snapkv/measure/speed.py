"""Measure the decoding and prefill speed of several caches, which take turns in one process."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import all_caches, kv_bytes, layer_caches
from ..engine.generate import generate_step
from ..engine.loop_model import observing_queries
from ..engine.report import CompressionReport
from ..planning.settings import Setting
from ..planning.units import format_bytes
from .contenders import Contender, contenders, decoding_cache, full_and_policies, random_prompt
from .methods import FULL_CACHE
from .reading import lookahead_of
from .tables import Table

N_WARM_UP = 3  # unmeasured steps at the start
N_IN_TURN = 5  # measured steps of a cache before the next cache's turn
N_ANSWER = 8  # tokens decoded after each prompt, not counting a policy's lookahead

Row = dict[str, Any]
Measurement = tuple[Contender, dict[str, Any]]  # a contender and its figures


def measure_speed(
    model,
    policies: list[Setting],
    *,
    contexts: list[int],
    prompts: list[int],
    trials: int,
    steps: int,
    on_start: Callable[[str, int], None],
    on_rows: Callable[[list[Row]], None],
) -> list[Row]:
    """Measure decoding and prefill, and return rows for JSON, one per context length and contender.

    Args:
        model: the mlx-lm model to measure.
        policies: settings to measure in addition to the full cache.
        contexts: context lengths to measure decoding at.
        prompts: prompt lengths to measure prefill at, for the full cache and all policies.
        trials: number of times that each contender reads a prompt of each length.
        steps: number of tokens that each contender decodes per length.
        on_start: called at the start of each phase with the phase's name, "decoding" or "reading", and the number of
            lengths.
        on_rows: called after each length, with all rows so far.
    """
    rows: dict[tuple[int, str], Row] = {}

    def add_rows(context: int, measurements: Iterable[Measurement]) -> None:
        for contender, figures in measurements:
            row = {"context": context, "contender": contender.name, "entries": contender.entries}
            # The row for this length may already contain the decoding speed.
            earlier_row = rows.get((context, contender.name), {})
            rows[context, contender.name] = row | figures | earlier_row
        on_rows(list(rows.values()))

    on_start("decoding", len(contexts))
    for context in contexts:
        add_rows(context, measure_decoding(model, context, policies, steps))
    on_start("reading", len(prompts))
    for n_prompt in prompts:
        readers = full_and_policies(n_prompt, policies)
        prompt = random_prompt(n_prompt)
        add_rows(n_prompt, measure_prefill(model, prompt, readers, trials))
    return sorted(rows.values(), key=lambda row: row["context"])


def measure_decoding(model, context: int, policies: list[Setting], steps: int) -> list[Measurement]:
    """Return the contenders that can decode, with their median step times and KV bytes."""
    decoding_contenders = []
    caches = []
    for contender in contenders(model, context, policies):
        cache = decoding_cache(model, contender, context)
        if _can_decode(model, cache):
            decoding_contenders.append(contender)
            caches.append(cache)
    seconds_by_cache = time_steps_in_turn(model, caches, steps)
    measurements = []
    for contender, cache, seconds in zip(decoding_contenders, caches, seconds_by_cache):
        figures = {
            "step_seconds": statistics.median(seconds),
            "kv_bytes": entries_bytes(cache),
        }
        measurements.append((contender, figures))
    return measurements


def _can_decode(model, cache: list[Any]) -> bool:
    """Run the warm-up steps and return whether they succeed.

    They fail if mlx-lm does not support this kind of cache for the model, for example a quantised cache for a model
    with attention sinks.
    """
    try:
        with observing_queries(model, cache):
            for _ in range(N_WARM_UP):
                _step_seconds(model, cache)
    except (ValueError, AttributeError):
        return False
    return True


def time_steps_in_turn(model, caches: list[list[Any]], steps: int) -> list[list[float]]:
    """Decode `steps` tokens from each prompt cache, and return each cache's step times in seconds.

    The caches take turns of several steps, and each round starts with a different cache. A turn's first step is not
    measured: the processor's own caches still hold another contender's entries then, as they never do in an answer.
    """
    step_seconds: list[list[float]] = [[] for _ in caches]
    turns = deque(zip(caches, step_seconds))
    for n_done in range(0, steps, N_IN_TURN):
        n_measured = min(N_IN_TURN, steps - n_done)
        for cache, seconds in turns:
            with observing_queries(model, cache):
                _, *measured = [_step_seconds(model, cache) for _ in range(1 + n_measured)]
            seconds += measured
        turns.rotate(-1)
    return step_seconds


def _step_seconds(model, cache: list[Any]) -> float:
    """Decode one token, and return the time it took."""
    started = time.perf_counter()
    mx.eval(model(mx.zeros((1, 1), mx.int32), cache=cache))
    seconds = time.perf_counter() - started
    _trim_token(cache)
    return seconds


def _trim_token(cache: list[Any]) -> None:
    """Trim the last token from mlx-lm's full caches, so that every step reads the same entries."""
    for layer_cache in all_caches(cache):
        if layer_cache.is_trimmable() and not _is_rotating(layer_cache):
            layer_cache.trim(1)


def _is_rotating(cache: Any) -> bool:
    """Return whether a layer's cache is mlx-lm's rotating cache."""
    return hasattr(cache, "max_size")


def entries_bytes(prompt_cache: list[Any]) -> int:
    """Return the bytes of keys, values and indexes in all caches, including rotating ones.

    A sparse cache's `kv_nbytes` covers only what one token reads: entries, cluster means and the index. The size of all
    entries is added to it, so the entries that a token reads are counted twice.
    """
    choice_bytes = sum(cache.full_nbytes for cache in layer_caches(prompt_cache) if cache.chooses)
    rotating_bytes = sum(cache.nbytes for cache in all_caches(prompt_cache) if _is_rotating(cache))
    return kv_bytes(prompt_cache) + choice_bytes + rotating_bytes


def measure_prefill(
    model, prompt: mx.array, readers: list[Contender], trials: int
) -> list[Measurement]:
    """Return each contender with its median figures over `trials` requests.

    The contenders take turns, in reverse order every other round.
    """
    figures_by_reader: list[list[dict[str, Any]]] = [[] for _ in readers]
    for trial in range(trials):
        turns = list(zip(readers, figures_by_reader))
        if trial % 2:
            turns.reverse()
        for contender, reader_figures in turns:
            reader_figures.append(_measure_request(model, prompt, contender))
    return [
        (contender, _medians(reader_figures))
        for contender, reader_figures in zip(readers, figures_by_reader)
    ]


def _medians(trials: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure over several trials."""
    return {name: statistics.median(figures[name] for figures in trials) for name in trials[0]}


def _measure_request(model, prompt: mx.array, contender: Contender) -> dict[str, Any]:
    """Answer a prompt, and return the seconds to the first token (including selection), peak memory and KV bytes."""
    cache = make_prompt_cache(model)
    policy = contender.policy
    mx.clear_cache()
    mx.reset_peak_memory()
    lookahead = lookahead_of(policy)
    seconds, report = answer_prompt(model, prompt, cache, lookahead + N_ANSWER, policy=policy)
    if lookahead > 1:  # selection follows the first token, so `seconds` does not include it
        seconds += report.selection_seconds
    peak_bytes = mx.get_peak_memory()
    return {"read_seconds": seconds, "peak_bytes": peak_bytes, "kv_bytes": kv_bytes(cache)}


def answer_prompt(
    model, prompt: mx.array, cache: list[Any], max_tokens: int, **options: Any
) -> tuple[float, CompressionReport]:
    """Answer a prompt with `generate_step` and return the seconds to the first token and the report.

    Args:
        model: an mlx-lm model.
        prompt: `(T,)` token ids.
        cache: a prompt cache, empty or with earlier tokens. If a policy compresses the prompt, the caches are replaced
            by compressed ones.
        max_tokens: maximum number of tokens in the answer, at least 1.
        **options: other keyword arguments for `generate_step`.
    """
    reports: list[CompressionReport] = []
    options |= {"prompt_cache": cache, "max_tokens": max_tokens, "on_report": reports.append}
    started = time.perf_counter()
    steps = generate_step(prompt, model, **options)
    next(steps)
    first_token_seconds = time.perf_counter() - started
    for _ in steps:
        pass
    return first_token_seconds, reports[0]


def speed_table(rows: list[Row]) -> Table:
    """Format the rows of `measure_speed` as a table."""
    table = Table(
        "Decoding and prefill by context length",
        "Decoding: the median step, with the caches taking turns; they hold random entries, since only shapes matter "
        'for speed. Ratios are to the full cache. "Read": seconds from a random prompt to the first token, including '
        "selection, and the peak memory of that. Sparse attention chooses entries in every decoding step, and with "
        "`read=sparse` in prompt chunks, too. In rows with tokens/s, its KV memory includes the index and the means, "
        "and counts the entries that a step reads twice.",
        ["context", "cache", "entries", "tokens/s", "KV memory", "read", "peak memory"],
    )
    full_rows = {row["context"]: row for row in rows if row["contender"] == FULL_CACHE}
    for row in rows:
        full_row = full_rows[row["context"]]
        # A row has figures for decoding, for prefill, or for both.
        decoding_text = reading_text = peak_text = ""
        if "step_seconds" in row:
            step_seconds = row["step_seconds"]
            ratio = full_row["step_seconds"] / step_seconds
            decoding_text = f"{1 / step_seconds:.1f}, {ratio:.2f}x"
        if "read_seconds" in row:
            reading_text = f"{row['read_seconds']:.2f} s{_ratio(row, full_row, 'read_seconds')}"
            peak_text = f"{format_bytes(row['peak_bytes'])}{_ratio(row, full_row, 'peak_bytes')}"
        table.add(
            f"{row['context']:,}",
            row["contender"],
            f"{row['entries']:,}",
            decoding_text,
            format_bytes(row["kv_bytes"]),
            reading_text,
            peak_text,
        )
    return table


def _ratio(row: Row, full_row: Row, figure: str) -> str:
    """Return the ratio to the full cache's figure, such as ", 0.50x", or "" if the full cache lacks the figure."""
    if figure not in full_row:
        return ""
    return f", {row[figure] / full_row[figure]:.2f}x"
