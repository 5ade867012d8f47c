"""mlx-lm's `generate_step`, `stream_generate` and `generate`, with a policy."""

from __future__ import annotations

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
from ..entries.quantization import taken_from
from ..errors import SnapKVError
from ..policies import Policy, SnapKV, Stages, resolve_policy
from .decision import gate
from .prefill import mlx_generate, observing
from .report import NO_POLICY, CompressionReport
from .request import Request
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
    on_report: ReportCallback | None = None,
    **kwargs: Any,
) -> Iterator[tuple[int, mx.array]]:
    """`mlx_lm.generate.generate_step` with a compressed prompt.

    Args:
        prompt: `(T,)` token ids.
        model: an mlx-lm model.
        snapkv: a `SnapKV`, a dict or `"key=value,..."` string of its options.
        policy: a policy object, or a string such as `"keydiff:budget=8192"`.
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

    def start(model, options: dict[str, Any]) -> Iterator[tuple[int, mx.array]]:
        return mlx_generate.generate_step(prompt, model, **options)

    max_tokens = kwargs.get("max_tokens", MAX_TOKENS)
    return _served(start, model, len(prompt), max_tokens, chosen, on_report, kwargs)


def stream_generate(
    model,
    tokenizer,
    prompt: str | mx.array | list[int],
    max_tokens: int = MAX_TOKENS,
    draft_model: Any = None,
    *,
    snapkv: SnapKV | dict[str, Any] | str | bool | None = None,
    policy: Policy | Stages | str | None = None,
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
    tokens = encode_prompt(tokenizer, prompt)

    def serve(tokenizer, options: dict[str, Any], on_report) -> Iterator[GenerationResponse]:
        def start(model, options: dict[str, Any]) -> Iterator[GenerationResponse]:
            return mlx_generate.stream_generate(model, tokenizer, tokens, max_tokens, **options)

        n = len(tokens)
        return _served(start, model, n, max_tokens, chosen, on_report, options, without_compression)

    options = {"draft_model": draft_model, **kwargs}
    if draft_model is None:
        return serve(tokenizer, options, on_report)
    require_rewindable(model, options.get("prompt_cache"))
    if chosen is None or _reason_for_nothing(chosen, len(tokens), max_tokens, options):
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
    start: Callable[[Any, dict[str, Any]], Iterator[Any]],
    model,
    n_prompt: int,
    max_tokens: int,
    policy: Policy | Stages | None,
    on_report: ReportCallback | None,
    options: dict[str, Any],
    after: Callable[[Any, float], Any] = lambda item, seconds: item,
) -> Iterator[Any]:
    """mlx-lm's own iterator, `start(model, options)`, if need be with a compression between two of its steps.

    `after` amends the items that come after it, given the seconds it took.
    """
    on_report = on_report or (lambda report: None)
    reason = _reason_for_nothing(policy, n_prompt, max_tokens, options)
    if policy is None or reason is not None:
        on_report(CompressionReport(str(policy or NO_POLICY), n_prompt, reason))
        return _continued(start, model, options)
    require_no_conflict(options)
    given = options.get("prompt_cache")
    prompt_cache = make_prompt_cache(model) if given is None else given
    # Ours to do with what is kept; mlx-lm would quantise the entries while they are still to be chosen from.
    quantization, options = taken_from(options)
    request = Request(model, policy, n_prompt, prompt_cache, quantization)
    return drive(start, request, on_report, options, after, keep=given is not None)


def require_no_conflict(options: dict[str, Any]) -> None:
    """Raises: SnapKVError: one of mlx-lm's options can't be served together with a policy."""
    if options.get("max_kv_size") is not None:
        raise SnapKVError("max_kv_size also limits the entries: drop it or the policy")


def drive(
    start: Callable[[Any, dict[str, Any]], Iterator[Any]],
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
    begin = functools.partial(start, request.model)
    if not request.decode_policy.last_token:
        return _compressed_before_last_token(begin, request, on_report, options)
    return _compressed_at_token(begin(options), request, on_report, after, keep)


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
            yield from start(going_on, options)

    return items()


def _reason_for_nothing(
    policy: Policy | Stages | None, n_prompt: int, max_tokens: int, options: dict[str, Any]
) -> str | None:
    if policy is None:
        return "no policy was given: pass snapkv or policy to compress"
    if options.get("input_embeddings") is not None:
        return "a prompt given as embeddings is not compressed"
    return gate(policy, n_prompt, options.get("prompt_cache"), max_tokens)


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

        yield from start(options | {"prompt_progress_callback": callback})
