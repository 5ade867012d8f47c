"""Serving one request by mlx-lm's own iterators, with the compression between two of their steps."""

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

from mlx_lm.generate import GenerationResponse

from ..caches.layers import attention_layers, require_quantizable
from ..caches.matching import n_tokens
from ..entries.quantization import taken_from
from ..errors import SnapKVError
from ..models.trained_length import warn_beyond_trained_length
from ..planning.config import CompressionConfig
from ..planning.exclusions import When, require_compatible
from ..planning.request_plan import plan_request
from ..planning.speed_record import SETUP, Measurement
from ..sparse.prompt_caches import lasting_forms, make_caches
from .compress import KeptCallback
from .loop_model import drafted, evicts, observing, one_by_one, pacing
from .pace import Pace
from .report import ENDED_EARLY, ENDED_IN_BLOCKS, ENDED_IN_FULL, CompressionReport
from .request import Request, make_request
from .restore import CacheCopy

ReportCallback = Callable[[CompressionReport], None]

ENOUGH = 8  # tokens from which a mean time is reported


def served(
    start: Callable[..., Iterator[Any]],
    model,
    n_prompt: int,
    max_tokens: int,
    config: CompressionConfig,
    on_report: ReportCallback | None,
    options: dict[str, Any],
    *,
    on_kept: KeptCallback | None = None,
) -> Iterator[Any]:
    """Return mlx-lm's own iterator, `start(model, **options)`, with a compression between two of its steps if asked.

    If it fails before its first item, the caller's prompt cache is unchanged: with a policy the prompt is read on other
    caches, and with sparse attention `_all_or_nothing` restores it. A conversation restores its own cache.

    Args:
        start: mlx-lm's function, such as `generate_step`, with its prompt.
        model: the mlx-lm model.
        n_prompt: tokens to read.
        max_tokens: limit of the answer's tokens; -1 for no limit.
        config: with `turns`, `options` hold a conversation's own prompt cache.
        on_report: receives one `CompressionReport`; None for no report.
        options: mlx-lm's own keywords of `start`.
        on_kept: receives the entries that a policy keeps of each layer.
    """
    start = pacing(start)
    report_to = on_report or (lambda report: None)
    config = config.with_mlx_options(options)
    given = options.get("prompt_cache")
    turns = config.turns
    if config.max_kv_size is None:
        warn_beyond_trained_length(model, n_tokens(given or []) + n_prompt)
    # Without kv_bits: mlx-lm would quantise the entries while they are still to be chosen from.
    _, loop_options = taken_from(options)
    is_embedded = options.get("input_embeddings") is not None
    plan = plan_request(
        model, config, n_prompt, given, max_tokens=max_tokens, is_embedded=is_embedded
    )
    if plan.reason is not None:
        report_to(CompressionReport.of_full_cache(plan))
        return _left_to_mlx_lm(start, model, options)
    request = make_request(model, plan, given, owned=turns, on_kept=on_kept)
    loop_options |= {
        "prompt_cache": request.caches,
        "prefill_step_size": plan.chunk_size(loop_options.get("prefill_step_size")),
    }
    items = start(request.model, **loop_options)
    if turns or config.sparse is None:
        return _answered(items, request, report_to, keep=given is not None)
    caches = request.prompt_cache

    def compressed(report: CompressionReport) -> None:
        if given is not None:
            given[:] = lasting_forms(model, caches, config.store)
        report_to(report)

    return _all_or_nothing(_answered(items, request, compressed, given is not None), caches)


def require_servable(model, config: CompressionConfig) -> None:
    """Raise SnapKVError if options conflict, or the model can't be served with the config."""
    config.require(model)
    require_compatible(config, When.COMPRESSING)
    caches = make_caches(model, config.store, config.store_dir)
    layers = attention_layers(model, caches)
    if config.quantization is not None:
        require_quantizable(model, layers, config.quantization)


def _left_to_mlx_lm(start, model, options: dict[str, Any]) -> Iterator[Any]:
    """Return mlx-lm's own iterator.

    A prompt cache that evicts is fed as if tokens came one by one, and records the queries that vote.

    Raises: SnapKVError: embeddings are given with such a cache.
    """
    cache = options.get("prompt_cache") or []
    if options.get("input_embeddings") is not None and evicts(cache):
        raise SnapKVError(
            "input_embeddings can't continue from a prompt cache that evicts entries: give token ids, or compress "
            "the prompt with snapkv"
        )
    drafts: contextlib.AbstractContextManager = contextlib.nullcontext()
    if options.get("draft_model") is not None:
        drafts = drafted(cache)

    def items() -> Iterator[Any]:
        with observing(model, cache), drafts:
            yield from start(one_by_one(model, cache), **options)

    return items()


def _answered(
    items: Iterator[Any], request: Request, on_report: ReportCallback, keep: bool
) -> Iterator[Any]:
    """Yield the items of an answer; arguments as in `_compressed`."""
    if request.plan.adapts:
        return _adaptive(items, request, on_report)
    return _compressed(items, request, on_report, keep)


def _adaptive(items: Iterator[Any], request: Request, on_report: ReportCallback) -> Iterator[Any]:
    """Yield the items of a sparse answer, whose tokens read all entries, or few while that is faster.

    The index is made when the first tokens are to read few, so a short answer does without one.
    """
    pace = Pace(request.plan.n_prompt, request.setup_in_tokens())
    report = request.report
    timed = _Timed(items)
    report.read_all = [[1, None]]
    seconds = 0.0
    setup: list[Measurement] = []
    try:
        with request.recording():
            for n, item in enumerate(timed, 1):
                request.prompt_is_read()
                if pace.switches(timed.latest):
                    took = _switch(request, pace.reads_all, n, on_report)
                    seconds += took
                    if not setup and not request.plan.n_held:  # not the growth of an earlier index
                        setup.append(Measurement(SETUP, request.plan.n_prompt, took))
                report.full_token_seconds = pace.seconds.get(True)
                report.token_seconds = pace.seconds.get(False)
                yield _without(item, seconds)
    except GeneratorExit:
        _end_adaptive(request, [*pace.measurements, *setup], on_report)
        raise
    _end_adaptive(request, [*pace.measurements, *setup], on_report)


def _switch(request: Request, reads_all: bool, n: int, on_report: ReportCallback) -> float:
    """Let the tokens after the `n`-th of an answer read the other way, and return the seconds that this took.

    Args:
        request: the request, whose report notes the switch.
        reads_all: whether these tokens read all entries.
        n: number of tokens that the answer has.
        on_report: receives the report when the first tokens choose.
    """
    started = time.perf_counter()
    report = request.report
    if reads_all:
        request.read_all()
        report.read_all.append([n + 2, None])
    else:
        is_first = not request.is_compressed
        request.compress()
        report.read_all[-1][1] = n + 1  # mlx-lm has begun the next token
        if is_first:
            on_report(report)
    return time.perf_counter() - started


def _end_adaptive(
    request: Request, measurements: list[Measurement], on_report: ReportCallback
) -> None:
    """Extend the speed record by a sparse answer, and report on the answer if it ended before a token chose."""
    request.remember(measurements)
    if request.is_compressed:
        return
    report = request.end()
    if report.read_per_chunk is None:
        report.reason = ENDED_IN_FULL
    on_report(report)


def _without(item: Any, seconds: float) -> Any:
    """Return an item of mlx-lm's iterator, with these seconds left out of a `GenerationResponse`'s speed."""
    if not seconds or not isinstance(item, GenerationResponse):
        return item
    n = item.generation_tokens
    return dataclasses.replace(item, generation_tps=n / (n / item.generation_tps - seconds))


def _compressed(
    items: Iterator[Any], request: Request, on_report: ReportCallback, keep: bool
) -> Iterator[Any]:
    """Yield the items, and compress before the last token that votes is yielded: mlx-lm has fed it by then.

    Args:
        items: mlx-lm's iterator, which runs on the request's model and caches.
        request: the request, whose prompt has not been read.
        on_report: receives the report.
        keep: the caller sees the cache afterwards, so it is compressed also if the answer ends, or is no longer read,
            before that token.
    """
    before = _Timed(items)
    try:
        with request.recording():
            for item in itertools.islice(before, request.plan.n_ahead - 1):
                request.prompt_is_read()
                yield item
            item = next(before, None)
    except GeneratorExit:
        if keep:
            on_report(request.compress())
        raise
    if item is None and not keep:
        request.report.reason = (
            ENDED_IN_BLOCKS if request.plan.options.evicts_in_blocks else ENDED_EARLY
        )
        on_report(request.report)
        return
    started = time.perf_counter()
    report = request.compress()
    seconds = time.perf_counter() - started
    report.full_token_seconds = before.mean
    on_report(report)
    if item is None:
        return
    timed = _Timed(items)
    with request.recording():
        yield item
        for item in timed:
            report.token_seconds = timed.mean
            yield _without(item, seconds)


class _Timed(Iterator[Any]):
    """An iterator that times its items; the first does not count in the mean.

    Attributes:
        latest: the seconds of the latest item.
    """

    def __init__(self, items: Iterator[Any]):
        self._items = items
        self._n = -1
        self._seconds = 0.0
        self.latest = 0.0

    def __next__(self) -> Any:
        started = time.perf_counter()
        item = next(self._items)
        self.latest = time.perf_counter() - started
        self._n += 1
        self._seconds += self.latest if self._n else 0.0
        return item

    @property
    def mean(self) -> float | None:
        """Return the mean seconds of an item; None before `ENOUGH` items."""
        return self._seconds / self._n if self._n >= ENOUGH else None


def _all_or_nothing(items: Iterator[Any], prompt_cache: list) -> Iterator[Any]:
    """Yield the items of a request; if it fails before the first, restore its prompt cache."""
    before = CacheCopy(prompt_cache)
    try:
        first = next(items, None)
    except BaseException:
        before.restore()
        raise
    del before  # free the copies before the answer ends
    if first is not None:
        yield first
        yield from items
