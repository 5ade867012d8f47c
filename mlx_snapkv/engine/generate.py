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

from ..entries.quantization import taken_from
from ..errors import SnapKVError
from ..policies import Policy, SnapKV, Stages, resolve_policy
from .prefill import gate, mlx_generate, observes, observing
from .report import NO_POLICY, CompressionReport
from .request import RecordedRequest, last_voter
from .speculative import DraftedRequest, require_trimmable
from .split_calls import one_by_one

ReportCallback = Callable[[CompressionReport], None]

MAX_TOKENS = 256  # mlx-lm's own default

# Options of mlx-lm that also decide what becomes of the rows.
_CONFLICTS = {
    "max_kv_size": "max_kv_size also limits the rows: drop it or the policy",
}


def generate_step(
    prompt: mx.array,
    model,
    *args: Any,
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
        *args, **kwargs: mlx-lm's, untouched.

    Yields:
        Tokens and their log-probabilities `(vocab_size,)`, as mlx-lm does.

    Raises:
        SnapKVError: at the call, for options or models that can't be served.
    """
    chosen = resolve_policy(snapkv, policy)

    def start(model, options: dict[str, Any]) -> Iterator[tuple[int, mx.array]]:
        return mlx_generate.generate_step(prompt, model, *args, **options)

    max_tokens = args[0] if args else kwargs.get("max_tokens", MAX_TOKENS)
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
    the one after the cut, are the main model's alone; the greedy answer is that without a draft model.

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
        return _served(start, model, n, max_tokens, chosen, on_report, options, without_cut)

    options = {"draft_model": draft_model, **kwargs}
    if draft_model is None:
        return serve(tokenizer, options, on_report)
    require_trimmable(model, options.get("prompt_cache"))
    if chosen is None or _reason_for_nothing(chosen, len(tokens), max_tokens, options):
        return serve(tokenizer, options, on_report)
    request = DraftedRequest(model, draft_model, tokenizer, tokens, max_tokens, chosen, kwargs)
    return request.responses(serve, _tokens_before_cut(chosen), on_report)


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


def without_cut(response: GenerationResponse, cut_seconds: float) -> GenerationResponse:
    """A response from after the cut, its speed without the seconds that the cut took."""
    seconds = response.generation_tokens / response.generation_tps - cut_seconds
    return dataclasses.replace(response, generation_tps=response.generation_tokens / seconds)


def _served(
    start: Callable[[Any, dict[str, Any]], Iterator[Any]],
    model,
    n_prompt: int,
    max_tokens: int,
    policy: Policy | Stages | None,
    on_report: ReportCallback | None,
    options: dict[str, Any],
    after_cut: Callable[[Any, float], Any] = lambda item, seconds: item,
) -> Iterator[Any]:
    """mlx-lm's own iterator, `start(model, options)`, if need be with a cut made between two of its steps.

    `after_cut` amends the items that come after it, given the seconds it took.
    """
    on_report = on_report or (lambda report: None)
    reason = _reason_for_nothing(policy, n_prompt, max_tokens, options)
    if policy is None or reason is not None:
        on_report(CompressionReport(str(policy or NO_POLICY), n_prompt, reason))
        return _continued(start, model, options)
    for name, message in _CONFLICTS.items():
        if options.get(name) is not None:
            raise SnapKVError(message)
    given = options.get("prompt_cache")
    prompt_cache = make_prompt_cache(model) if given is None else given
    last = last_voter(policy, n_prompt, lookahead_of(policy))
    # Ours to do at the cut; mlx-lm would quantise the rows while they are still to be chosen from.
    quantization, options = taken_from(options)
    request = RecordedRequest(model, policy, n_prompt, prompt_cache, last, quantization)
    return drive(start, request, on_report, options, after_cut, keep=given is not None)


def drive(
    start: Callable[[Any, dict[str, Any]], Iterator[Any]],
    request: RecordedRequest,
    on_report: ReportCallback,
    options: dict[str, Any],
    after_cut: Callable[[Any, float], Any],
    *,
    keep: bool,
) -> Iterator[Any]:
    """mlx-lm's iterator over a request's caches, with the request's cut made between two of its steps.

    `keep`: the caller will see the cache even if it stops reading before the cut.
    """
    options = options | {
        "prompt_cache": request.caches,
        "prefill_step_size": request.step_size(options.get("prefill_step_size")),
    }
    begin = functools.partial(start, request.model)
    if not request.answering.last_token:
        return _cut_before_last_token(begin, request, on_report, options)
    n = _tokens_before_cut(request.policy)
    return _cut_at_token(begin(options), request, n, on_report, after_cut, keep)


def lookahead_of(policy: Policy | Stages) -> int:
    """Answer tokens that vote."""
    _, answering = policy.stages
    return answering.n_lookahead


def _tokens_before_cut(policy: Policy | Stages) -> int:
    """Answer tokens that are decoded on the full rows and held by the cache when it is cut."""
    _, answering = policy.stages
    return max(1, lookahead_of(policy)) if answering.last_token else 0


def _continued(start, model, options: dict[str, Any]) -> Iterator[Any]:
    """mlx-lm's own iterator; on caches that evict, as if token by token, and with the queries that they ask for."""
    cache = options.get("prompt_cache") or []
    items = start(one_by_one(model, cache), options)
    return _recorded(items, model, cache) if observes(cache) else items


def _recorded(items: Iterator[Any], model, prompt_cache: list) -> Iterator[Any]:
    with observing(model, prompt_cache):
        yield from items


def _reason_for_nothing(
    policy: Policy | Stages | None, n_prompt: int, max_tokens: int, options: dict[str, Any]
) -> str | None:
    if policy is None:
        return "no policy was given: pass snapkv or policy to compress"
    if options.get("input_embeddings") is not None:
        return "a prompt given as embeddings is not compressed"
    return gate(policy, n_prompt, options.get("prompt_cache"), max_tokens)


def _cut_at_token(
    items: Iterator[Any], request: RecordedRequest, n: int, on_report, after_cut, keep: bool
) -> Iterator[Any]:
    """Cut when the `n`-th token is about to be yielded: mlx-lm has fed it by then, so its query is there."""
    try:
        with request.recording():
            for item in itertools.islice(items, n - 1):
                request.prompt_is_read()
                yield item
            item = next(items, None)
    except GeneratorExit:
        if keep:
            on_report(request.cut())
        raise
    on_report(request.cut())
    if item is not None:
        with request.decoding():
            yield item
            for item in items:
                yield after_cut(item, request.cut_seconds)


def _cut_before_last_token(start, request: RecordedRequest, on_report, options) -> Iterator[Any]:
    """Cut when mlx-lm reports that all of the prompt but its last token is processed."""
    progress = options.get("prompt_progress_callback") or (lambda done, total: None)
    with contextlib.ExitStack() as patched:
        patched.enter_context(request.recording())

        def callback(done: int, total: int) -> None:
            progress(done, total)
            if done == total - 1:
                on_report(request.cut())
                patched.close()
                patched.enter_context(request.decoding())

        yield from start(options | {"prompt_progress_callback": callback})
