"""mlx-lm's `generate_step`, `stream_generate` and `generate`, with a policy."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..caches.layers import is_compressed
from ..caches.memories import lasting_forms, recalling_caches
from ..entries.quantization import taken_from
from ..errors import SnapKVError
from ..policies import Policy, SnapKV, Stages, resolve_policy
from .decision import gate
from .prefill import mlx_generate, observing
from .recalling import VERIFY_BELOW, Recall, RecallingRequest
from .report import NO_POLICY, CompressionReport
from .request import Request, held_tokens
from .rewind import Rewind
from .speculative import DraftedRequest, require_rewindable
from .split_calls import gives_way, one_by_one, rewinding

ReportCallback = Callable[[CompressionReport], None]

MAX_TOKENS = 256  # mlx-lm's own default


def generate_step(
    prompt: mx.array,
    model,
    stream: Any = None,
    *,
    snapkv: SnapKV | dict[str, Any] | str | bool | None = None,
    policy: Policy | Stages | str | None = None,
    memory: str = "drop",
    verify: str | None = None,
    verify_below: float = VERIFY_BELOW,
    on_report: ReportCallback | None = None,
    **kwargs: Any,
) -> Iterator[tuple[int, mx.array]]:
    """`mlx_lm.generate.generate_step` with a compressed prompt.

    Args:
        prompt: `(T,)` token ids.
        model: an mlx-lm model.
        snapkv: a `SnapKV`, a dict or `"key=value,..."` string of its options.
        policy: a policy object, or a string such as `"keydiff:budget=8192"`.
        memory: "drop": entries that are not kept are gone. "recall", "recall:8bit", "recall:4bit", "recall:file": all
            of the prompt's stay, in memory, quantised or in files, and in a `prompt_cache` that was given; the answer's
            tokens are to be read again with what follows.
        verify: what the answer does with the entries that stay. None: nothing. "unsure": a token of less probability
            than `verify_below` votes over all of them, and is decoded again from those it votes for.
        on_report: receives one `CompressionReport`, before the first token that the compressed cache serves.
        stream, **kwargs: mlx-lm's, untouched.

    Yields:
        Tokens and their log-probabilities `(vocab_size,)`, as mlx-lm does.

    Raises:
        SnapKVError: at the call, for options or models that can't be served.
    """
    chosen = resolve_policy(snapkv, policy)
    if isinstance(stream, int):
        raise SnapKVError(
            f"generate_step's third argument is mlx-lm's stream: give max_tokens={stream}"
        )
    if stream is not None:
        kwargs["stream"] = stream
    start = functools.partial(mlx_generate.generate_step, prompt)
    max_tokens = kwargs.get("max_tokens", MAX_TOKENS)
    recall = Recall(memory, verify, verify_below)
    return _served(start, model, len(prompt), max_tokens, chosen, recall, on_report, kwargs)


def stream_generate(
    model,
    tokenizer,
    prompt: str | mx.array | list[int],
    max_tokens: int = MAX_TOKENS,
    draft_model: Any = None,
    *,
    snapkv: SnapKV | dict[str, Any] | str | bool | None = None,
    policy: Policy | Stages | str | None = None,
    memory: str = "drop",
    verify: str | None = None,
    verify_below: float = VERIFY_BELOW,
    on_report: ReportCallback | None = None,
    **kwargs: Any,
) -> Iterator[GenerationResponse]:
    """`mlx_lm.stream_generate` with a compressed prompt; see `generate_step` for the keywords.

    With a draft model, the main model's cache is compressed and the draft's is kept in full. The first tokens, up to
    the one after the compression, are the main model's alone; the greedy answer is that without a draft model.

    Yields:
        mlx-lm's `GenerationResponse`s; `prompt_tokens` and `prompt_tps` count the whole prompt, and
        `generation_tps` leaves out the time that the selection took.
    """
    chosen = resolve_policy(snapkv, policy)
    recall = Recall(memory, verify, verify_below)
    if draft_model is not None and memory != "drop":
        raise SnapKVError(f"a draft model can't be combined with memory={memory}: drop one of them")
    tokens = encode_prompt(tokenizer, prompt)

    def serve(tokenizer, options: dict[str, Any], on_report) -> Iterator[GenerationResponse]:
        given = {"tokenizer": tokenizer, "prompt": tokens, "max_tokens": max_tokens}
        start = functools.partial(mlx_generate.stream_generate, **given)
        n = len(tokens)
        return _served(
            start, model, n, max_tokens, chosen, recall, on_report, options, without_compression
        )

    options = {"draft_model": draft_model, **kwargs}
    if draft_model is None:
        return serve(tokenizer, options, on_report)
    require_rewindable(model, options.get("prompt_cache"))
    reason = _reason_for_nothing(model, chosen, len(tokens), max_tokens, options, recall)
    if chosen is None or reason is not None:
        return serve(tokenizer, options, on_report)
    request = DraftedRequest(model, draft_model, tokenizer, tokens, max_tokens, chosen, kwargs)
    return request.responses(serve, on_report)


def generate(
    model, tokenizer, prompt: str | list[int], verbose: bool = False, **kwargs: Any
) -> str:
    """`mlx_lm.generate` with a compressed prompt: the whole answer as a string.

    Args:
        verbose: print the text as it comes, and the figures after it.
        **kwargs: as for `stream_generate`.
    """
    reports: list[CompressionReport] = []
    callback = kwargs.pop("on_report", None)

    def on_report(report: CompressionReport) -> None:
        reports.append(report)
        if callback is not None:
            callback(report)

    text = ""
    response = None
    for response in stream_generate(model, tokenizer, prompt, on_report=on_report, **kwargs):
        text += response.text
        if verbose:
            print(response.text, end="", flush=True)
    if verbose and response is not None:
        print(
            f"\nPrompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec\n"
            f"Generation: {response.generation_tokens} tokens, {response.generation_tps:.3f} tokens-per-sec\n"
            f"Peak memory: {response.peak_memory:.3f} GB\n"
            f"Compression: {reports[0]}"
        )
    return text


def encode_prompt(tokenizer, prompt: str | mx.array | list[int]) -> mx.array:
    """Token ids `(T,)` of a prompt, with special tokens where mlx-lm's `stream_generate` adds them."""
    if isinstance(prompt, str):
        if not isinstance(tokenizer, TokenizerWrapper):
            tokenizer = TokenizerWrapper(tokenizer)
        bos = tokenizer.bos_token
        special = bos is None or not prompt.startswith(bos)
        return mx.array(tokenizer.encode(prompt, add_special_tokens=special))
    return prompt if isinstance(prompt, mx.array) else mx.array(prompt)


def without_compression(response: GenerationResponse, seconds: float) -> GenerationResponse:
    """A response from after the compression, its speed without the seconds that it took."""
    decoding = response.generation_tokens / response.generation_tps - seconds
    return dataclasses.replace(response, generation_tps=response.generation_tokens / decoding)


def _served(
    start: Callable[..., Iterator[Any]],
    model,
    n_prompt: int,
    max_tokens: int,
    policy: Policy | Stages | None,
    recall: Recall,
    on_report: ReportCallback | None,
    options: dict[str, Any],
    after: Callable[[Any, float], Any] = lambda item, seconds: item,
) -> Iterator[Any]:
    """mlx-lm's own iterator, `start(model, **options)`, if need be with a compression between two of its steps.

    `after` amends the items that come after it, given the seconds it took.
    """
    on_report = on_report or (lambda report: None)
    recall.require(policy)
    reason = _reason_for_nothing(model, policy, n_prompt, max_tokens, options, recall)
    if policy is None or reason is not None:
        on_report(CompressionReport(str(policy or NO_POLICY), n_prompt, reason))
        return _continued(start, model, options)
    require_no_conflict(options)
    given = options.get("prompt_cache")
    prompt_cache = make_prompt_cache(model) if given is None else given
    # Ours to do with what is kept; mlx-lm would quantise the entries while they are still to be chosen from.
    quantization, options = taken_from(options)
    if recall.memory == "drop":
        request = Request(model, policy, n_prompt, prompt_cache, quantization)
        return drive(start, request, on_report, options, after, keep=given is not None)
    caches = recalling_caches(model, prompt_cache, recall.memory)
    recalling = RecallingRequest(model, policy, n_prompt, caches, quantization, recall=recall)

    def compressed(report: CompressionReport) -> None:
        prompt_cache[:] = lasting_forms(model, caches, recall.memory)
        on_report(report)

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
    begin = functools.partial(start, request.loop_model)
    if not request.decode_policy.last_token:
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


def _reason_for_nothing(
    model,
    policy: Policy | Stages | None,
    n_prompt: int,
    max_tokens: int,
    options: dict[str, Any],
    recall: Recall,
) -> str | None:
    if policy is None:
        return "no policy was given: pass snapkv or policy to compress"
    if options.get("input_embeddings") is not None:
        return "a prompt given as embeddings is not compressed"
    given = options.get("prompt_cache")
    if given is not None and recall.memory != "drop":
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
