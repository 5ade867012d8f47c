"""Serves a request with mlx-lm's generators, and compresses the prompt cache between steps."""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

from mlx_lm.generate import GenerationResponse

from ..caches.layers import attention_layers, n_tokens, require_quantizable
from ..entries.quantization import without_quantization
from ..errors import SnapKVError
from ..models.trained_length import warn_beyond_trained_length
from ..planning.config import CompressionConfig
from ..planning.request_plan import plan_request
from ..planning.speed_record import SETUP, Measurement
from ..sparse.prompt_caches import caches_to_save, make_caches
from .compress import KeptCallback
from .loop_model import evicts, observing_queries, split_at_evictions, trimming_drafts, with_pacing
from .pace import Pace
from .report import ENDED_EARLY, ENDED_IN_BLOCKS, ENDED_IN_FULL, CompressionReport
from .request import Request
from .restore import restoring

ReportCallback = Callable[[CompressionReport], None]

MIN_TIMED = 8  # minimum number of timed tokens for reporting a mean


def serve(
    start: Callable[..., Iterator[Any]],
    model,
    n_prompt: int,
    max_tokens: int,
    config: CompressionConfig,
    on_report: ReportCallback,
    options: dict[str, Any],
    *,
    on_kept: KeptCallback | None = None,
) -> Iterator[Any]:
    """Start a request, and return an iterator over the items that `start(model, **options)` yields.

    The cache is compressed between steps of mlx-lm's iterator.

    If a compressed or sparse request fails before the first item, the caller's prompt cache is unchanged. With a
    policy, the prompt is read into separate caches. With sparse attention, `_all_or_nothing` restores the cache.
    Conversations restore their own caches.

    Args:
        start: mlx-lm's function, such as `generate_step`, with the prompt already bound.
        model: the mlx-lm model.
        n_prompt: prompt length in tokens.
        max_tokens: maximum answer length in tokens, or -1 for no limit.
        config: the request's config. If `config.turns` is true, `options` must contain the conversation's prompt cache.
        on_report: called with the `CompressionReport`.
        options: mlx-lm's keyword arguments for `start`.
        on_kept: called for each layer with the kept entries.
    """
    start = with_pacing(start)
    config = config.with_mlx_options(options)
    prompt_cache = options.get("prompt_cache")
    will_use_cache = prompt_cache is not None
    if config.max_kv_size is None:
        warn_beyond_trained_length(model, n_tokens(prompt_cache or []) + n_prompt)
    # Leave out kv_bits, or mlx-lm will quantise the entries before the policy scores them.
    loop_options = without_quantization(options)
    is_embedded = options.get("input_embeddings") is not None
    plan = plan_request(
        model, config, n_prompt, prompt_cache, max_tokens=max_tokens, is_embedded=is_embedded
    )
    if plan.is_left_to_mlx_lm:
        on_report(CompressionReport.of_full_cache(plan))
        return _run_in_mlx_lm(start, model, options)
    request = Request(model, plan, prompt_cache, uses_store=config.turns, on_kept=on_kept)
    loop_options |= {
        "prompt_cache": request.caches,
        "prefill_step_size": plan.chunk_size(loop_options.get("prefill_step_size")),
    }
    items = start(request.model, **loop_options)
    if config.turns or config.sparse is None:
        return _answer(items, request, on_report, will_use_cache)
    stored_caches = request.prompt_cache

    def hand_back_and_report(report: CompressionReport) -> None:
        if prompt_cache is not None:
            prompt_cache[:] = caches_to_save(stored_caches)
        on_report(report)

    answer = _answer(items, request, hand_back_and_report, will_use_cache)
    return _all_or_nothing(answer, stored_caches)


def require_servable(model, config: CompressionConfig) -> None:
    """Check that the config has no conflicting options and is supported by the model. Raises: SnapKVError."""
    config.require_supported(model)
    config.require_compressible()
    caches = make_caches(model, config.sparse)
    layers = attention_layers(model, caches)  # raises an error if the model is not supported
    if config.quantization is not None:
        require_quantizable(model, layers, config.quantization)


def _run_in_mlx_lm(start, model, options: dict[str, Any]) -> Iterator[Any]:
    """Return mlx-lm's iterator for a request that is not compressed.

    If an earlier request compressed the prompt cache, the cache can still evict. In that case, model calls are split at
    evictions, and the queries that vote are recorded.

    Raises: SnapKVError: the prompt is given as embeddings, and the prompt cache evicts.
    """
    prompt_cache = options.get("prompt_cache") or []
    if options.get("input_embeddings") is not None and evicts(prompt_cache):
        raise SnapKVError(
            "input_embeddings can't continue from a prompt cache that evicts entries: give token ids, or compress "
            "the prompt with snapkv"
        )
    trimming: contextlib.AbstractContextManager = contextlib.nullcontext()
    if options.get("draft_model") is not None:
        trimming = trimming_drafts(prompt_cache)

    def items() -> Iterator[Any]:
        with observing_queries(model, prompt_cache), trimming:
            yield from start(split_at_evictions(model, prompt_cache), **options)

    return items()


def _answer(
    items: Iterator[Any], request: Request, on_report: ReportCallback, will_use_cache: bool
) -> Iterator[Any]:
    """Yield the items of an answer. See `_compressed_answer` for the arguments."""
    if request.plan.adapts:
        return _adaptive_answer(items, request, on_report)
    return _compressed_answer(items, request, on_report, will_use_cache)


def _adaptive_answer(
    items: Iterator[Any], request: Request, on_report: ReportCallback
) -> Iterator[Any]:
    """Yield the items of an answer, switching between full and sparse attention depending on which is faster.

    The index is built when sparse attention is first tried, so a short answer does not build one.
    """
    pace = Pace(request.plan.n_prompt, request.tokens_to_repay_setup())
    builds_index = request.plan.n_earlier == 0  # later turns only extend it
    report = request.report
    report.read_all = [[1, None]]
    timed_items = _TimedItems(items)
    pause_seconds = 0.0
    setup_measurements: list[Measurement] = []
    try:
        with request.recording():
            for n_tokens, item in enumerate(timed_items, 1):
                request.record_prefill_time()
                item = _without_pause(item, pause_seconds)  # it arrived before any switch below
                if pace.switches_after(timed_items.latest_seconds):
                    switch_seconds = _switch_attention(request, pace.reads_all, n_tokens, on_report)
                    pause_seconds += switch_seconds
                    if builds_index and not setup_measurements:
                        setup_measurements.append(
                            Measurement(SETUP, request.plan.n_prompt, switch_seconds)
                        )
                report.full_token_seconds = pace.seconds.get(True)
                report.token_seconds = pace.seconds.get(False)
                yield item
    except GeneratorExit:  # the caller abandoned the answer
        _end_adaptive_answer(request, [*pace.measurements, *setup_measurements], on_report)
        raise
    _end_adaptive_answer(request, [*pace.measurements, *setup_measurements], on_report)


def _switch_attention(
    request: Request, reads_all: bool, n_tokens: int, on_report: ReportCallback
) -> float:
    """Switch between full and sparse attention, and return how many seconds it took.

    Args:
        request: the request. The switch is added to its report.
        reads_all: whether the next tokens read all entries.
        n_tokens: number of answer tokens so far.
        on_report: called at the first switch to sparse attention.
    """
    started = time.perf_counter()
    report = request.report
    last_token_before_switch = n_tokens + 1  # mlx-lm has already started on it
    if reads_all:
        request.use_full_attention()
        report.read_all.append([last_token_before_switch + 1, None])
    else:
        is_first_switch = not request.is_compressed
        request.compress()
        latest_run = report.read_all[-1]  # [first, last] token of the run
        latest_run[1] = last_token_before_switch
        if is_first_switch:
            on_report(report)
    return time.perf_counter() - started


def _end_adaptive_answer(
    request: Request, measurements: list[Measurement], on_report: ReportCallback
) -> None:
    """Add measurements to the speed record.

    If no answer token used sparse attention, also finish the request and report on it.
    """
    request.record_speed(measurements)
    if request.is_compressed:
        return
    report = request.finish()
    if report.read_per_chunk is None:
        report.reason = ENDED_IN_FULL
    on_report(report)


def _without_pause(item: Any, pause_seconds: float) -> Any:
    """Exclude a pause from the generation speed of a `GenerationResponse`. Return other items unchanged."""
    if pause_seconds == 0 or not isinstance(item, GenerationResponse):
        return item
    n_tokens = item.generation_tokens
    seconds_without_pause = n_tokens / item.generation_tps - pause_seconds
    return dataclasses.replace(item, generation_tps=n_tokens / seconds_without_pause)


def _compressed_answer(
    items: Iterator[Any], request: Request, on_report: ReportCallback, will_use_cache: bool
) -> Iterator[Any]:
    """Yield the items of an answer, and compress just before yielding the last token that votes.

    If no answer token votes, compress just before yielding the first token. In either case, mlx-lm has already fed that
    token to the model.

    Args:
        items: mlx-lm's iterator, running on the request's model and caches.
        request: the request. Its prompt has not been read yet.
        on_report: called with the report.
        will_use_cache: whether the caller will use the cache again. If so, the cache is compressed even if the answer
            ends or is abandoned early.
    """
    full_items = _TimedItems(items)
    n_before_last_voter = request.plan.n_fed_before_compression - 1
    try:
        with request.recording():
            for item in itertools.islice(full_items, n_before_last_voter):
                request.record_prefill_time()
                yield item
            item = next(full_items, None)
    except GeneratorExit:
        if will_use_cache:
            on_report(request.compress())
        raise
    if item is None and not will_use_cache:
        request.report.reason = (
            ENDED_IN_BLOCKS if request.plan.config.evicts_in_blocks else ENDED_EARLY
        )
        on_report(request.report)
        return
    started = time.perf_counter()
    report = request.compress()
    pause_seconds = time.perf_counter() - started
    report.full_token_seconds = full_items.mean_seconds
    on_report(report)
    if item is None:
        return
    compressed_items = _TimedItems(items)
    with request.recording():
        yield item
        for item in compressed_items:
            report.token_seconds = compressed_items.mean_seconds
            yield _without_pause(item, pause_seconds)


class _TimedItems(Iterator[Any]):
    """An iterator that times each item.

    Attributes:
        latest_seconds: seconds that the latest item took.
    """

    def __init__(self, items: Iterator[Any]):
        self._items = items
        self._n_items = 0
        self._total_seconds = 0.0
        self.latest_seconds = 0.0

    def __next__(self) -> Any:
        started = time.perf_counter()
        item = next(self._items)
        self.latest_seconds = time.perf_counter() - started
        if self._n_items > 0:
            self._total_seconds += self.latest_seconds
        self._n_items += 1
        return item

    @property
    def mean_seconds(self) -> float | None:
        """Return the mean seconds per item, excluding the first. Return None if fewer than `MIN_TIMED` were timed."""
        n_timed = self._n_items - 1
        return self._total_seconds / n_timed if n_timed >= MIN_TIMED else None


def _all_or_nothing(items: Iterator[Any], prompt_cache: list) -> Iterator[Any]:
    """Yield the items of a request. Restore the prompt cache if the request fails before the first item."""
    with restoring(prompt_cache):
        first_item = next(items, None)
    if first_item is not None:
        yield first_item
        yield from items
