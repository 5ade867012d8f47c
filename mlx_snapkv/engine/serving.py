"""One request served by mlx-lm's own iterators, with its compression between two of their steps."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import is_compressed
from ..caches.memories import lasting_forms, recalling_caches
from ..entries.quantization import taken_from
from ..errors import SnapKVError
from ..policies import Policy, Stages
from .compress import KeptCallback
from .decision import gate
from .far import require_far
from .making import make_request
from .prefill import observing
from .recalling import Recall
from .report import NO_POLICY, CompressionReport
from .request import Request, held_tokens
from .rewind import Rewind
from .split_calls import gives_way, one_by_one, rewinding

ReportCallback = Callable[[CompressionReport], None]

MAX_TOKENS = 256  # mlx-lm's own default
NO_POLICY_REASON = "no policy was given: pass snapkv or policy to compress"


def without_compression(response: GenerationResponse, seconds: float) -> GenerationResponse:
    """A response from after the compression, its speed without the seconds that it took."""
    decoding = response.generation_tokens / response.generation_tps - seconds
    return dataclasses.replace(response, generation_tps=response.generation_tokens / decoding)


def served(
    start: Callable[..., Iterator[Any]],
    model,
    prompt: mx.array | list[int],
    max_tokens: int,
    policy: Policy | Stages | None,
    recall: Recall,
    on_report: ReportCallback | None,
    options: dict[str, Any],
    after: Callable[[Any, float], Any] = lambda item, seconds: item,
    on_kept: KeptCallback | None = None,
) -> Iterator[Any]:
    """mlx-lm's own iterator, `start(model, **options)`, if need be with a compression between two of its steps.

    `after` amends the items that come after it, given the seconds it took; `on_kept` is told what it keeps.
    """
    told = on_report or (lambda report: None)
    n_prompt = len(prompt)
    recall.require(policy)
    require_far(model, policy, recall)
    reason = reason_for_nothing(model, policy, n_prompt, max_tokens, options, recall)
    if policy is None or reason is not None:
        told(CompressionReport(str(policy or NO_POLICY), n_prompt, reason))
        return _continued(start, model, options)
    require_no_conflict(options)
    given = options.get("prompt_cache")
    prompt_cache = make_prompt_cache(model) if given is None else given
    # Ours to do with what is kept; mlx-lm would quantise the entries while they are still to be chosen from.
    quantization, options = taken_from(options)
    wanted = quantization, recall
    if recall.memory == "drop":
        request = make_request(model, policy, n_prompt, prompt_cache, *wanted)
        request.on_kept = on_kept
        return drive(start, request, told, options, after, keep=given is not None)
    caches = recalling_caches(model, prompt_cache, recall.memory, policy)
    recalling = make_request(model, policy, n_prompt, caches, *wanted)

    def compressed(report: CompressionReport) -> None:
        prompt_cache[:] = lasting_forms(model, caches, recall.memory)
        told(report)

    items = drive(start, recalling, compressed, options, after, keep=given is not None)
    return _all_or_nothing(items, caches)


def _all_or_nothing(items: Iterator[Any], prompt_cache: list) -> Iterator[Any]:
    """The items of a request; if it fails before the first, its cache is as it was."""
    before = Rewind(prompt_cache)
    try:
        first = next(items, None)
    except BaseException:
        before.restore()
        raise
    before.release()
    del before  # and what it keeps of entries that have given way
    if first is not None:
        yield first
        yield from items


def require_no_conflict(options: dict[str, Any]) -> None:
    """Raises: SnapKVError: one of mlx-lm's options can't be served together with a policy."""
    if options.get("max_kv_size") is not None:
        raise SnapKVError("max_kv_size also limits the entries: drop it or the policy")


def drive(
    start: Callable[..., Iterator[Any]],
    request: Request,
    on_report: ReportCallback,
    options: dict[str, Any],
    after: Callable[[Any, float], Any],
    *,
    keep: bool,
) -> Iterator[Any]:
    """mlx-lm's iterator over a request's caches, with its compression between two of its steps.

    `keep`: the caller will see the cache, also if the answer ends, or nobody reads on, before it is compressed.
    """
    options = options | {
        "prompt_cache": request.caches,
        "prefill_step_size": request.step_size(options.get("prefill_step_size")),
    }
    if options.get("prompt_progress_callback") is not None:
        told = request.progress(options["prompt_progress_callback"])
        options["prompt_progress_callback"] = told
    begin = functools.partial(start, request.loop_model)
    if request.compresses_before_last_token:
        return _compressed_before_last_token(begin, request, on_report, options)
    return _compressed_at_token(begin(**options), request, on_report, after, keep)


def _continued(start, model, options: dict[str, Any]) -> Iterator[Any]:
    """mlx-lm's own iterator; on caches whose entries give way, as if token by token, with the queries they ask for.

    Raises:
        SnapKVError: the tokens come as embeddings, which can't be split.
    """
    cache = options.get("prompt_cache") or []
    if options.get("input_embeddings") is not None and gives_way(cache):
        raise SnapKVError(
            "input_embeddings can't go on from a prompt cache whose entries give way: give token ids, or compress "
            "the prompt with snapkv and on_full=slide"
        )
    served: contextlib.AbstractContextManager = contextlib.nullcontext(one_by_one(model, cache))
    if options.get("draft_model") is not None and is_compressed(cache):
        served = rewinding(model, cache)

    def items() -> Iterator[Any]:
        with observing(model, cache), served as going_on:
            yield from start(going_on, **options)

    return items()


def reason_for_nothing(
    model,
    policy: Policy | Stages | None,
    n_prompt: int,
    max_tokens: int,
    options: dict[str, Any],
    recall: Recall,
) -> str | None:
    if policy is None:
        return NO_POLICY_REASON
    if options.get("input_embeddings") is not None:
        return "a prompt given as embeddings is not compressed"
    given = options.get("prompt_cache")
    if given is not None and recall.memory != "drop":
        if is_compressed(given):
            return None  # what has given way is to be recalled
        return gate(policy, held_tokens(model, given) + n_prompt, None, max_tokens)
    return gate(policy, n_prompt, given, max_tokens)


def _compressed_at_token(
    items: Iterator[Any], request: Request, on_report, after, keep: bool
) -> Iterator[Any]:
    """Compress when the last token that votes is about to be yielded: mlx-lm has fed it by then."""
    try:
        with request.recording():
            for item in itertools.islice(items, request.decision.n_ahead - 1):
                request.prompt_is_read()
                yield item
            item = next(items, None)
    except GeneratorExit:
        if keep:
            on_report(request.compress())
        raise
    if item is None and not keep:
        why = "the answer ended before its prompt was compressed"
        on_report(CompressionReport(str(request.policy), request.decision.n_prompt, why))
        return
    on_report(request.compress())
    if item is not None:
        with request.decoding():
            yield item
            for item in items:
                yield after(item, request.compress_seconds)


def _compressed_before_last_token(start, request: Request, on_report, options) -> Iterator[Any]:
    """Compress when mlx-lm reports that all of the prompt but its last token is processed."""
    progress = options.get("prompt_progress_callback") or (lambda done, total: None)
    with contextlib.ExitStack() as patched:
        patched.enter_context(request.recording())

        def callback(done: int, total: int) -> None:
            progress(done, total)
            if done == total - 1:
                on_report(request.compress())
                patched.close()
                patched.enter_context(request.decoding())

        yield from start(**options | {"prompt_progress_callback": callback})
