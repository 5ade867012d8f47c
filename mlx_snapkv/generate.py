"""mlx-lm's `generate_step`, `stream_generate` and `generate`, with a policy."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from .errors import SnapKVError
from .policies import Policy, SnapKV, resolve_policy
from .prefill import RecordedRequest, gate, mlx_generate
from .report import CompressionReport

ReportCallback = Callable[[CompressionReport], None]

DEFAULT_LOOKAHEAD = 4

# Options of mlx-lm that also decide what becomes of the rows.
_CONFLICTS = {
    "kv_bits": "quantised rows can't be compressed yet: drop kv_bits or the policy",
    "max_kv_size": "max_kv_size also limits the rows: drop it or the policy",
    "draft_model": "a draft model can't be combined with a policy yet: drop draft_model or the policy",
    "input_embeddings": "a prompt given as embeddings can't be compressed: drop input_embeddings or the policy",
}


def generate_step(
    prompt: mx.array,
    model,
    *args: Any,
    snapkv: SnapKV | dict[str, Any] | str | bool | None = None,
    policy: Policy | str | None = None,
    on_report: ReportCallback | None = None,
    **kwargs: Any,
) -> Iterator[tuple[int, mx.array]]:
    """`mlx_lm.generate.generate_step` with a compressed prompt.

    Args:
        prompt: `(T,)` token ids.
        model: an mlx-lm model.
        snapkv: a `SnapKV`, a dict or `"key=value,..."` string of its options.
        policy: a policy object, or a string such as `"snapkv:top_k=1024"`.
        on_report: receives one `CompressionReport`, before the first token that the compressed cache serves.
        *args, **kwargs: mlx-lm's, untouched.

    Yields:
        Tokens and their log-probabilities `(vocab_size,)`, as mlx-lm does.

    Raises:
        SnapKVError: at the call, for options or models that can't be served.
    """
    chosen = resolve_policy(snapkv, policy)
    if chosen is None:
        return mlx_generate.generate_step(prompt, model, *args, **kwargs)
    return _compressed(
        lambda options: mlx_generate.generate_step(prompt, model, *args, **options),
        model, len(prompt), chosen, on_report, kwargs,
    )  # fmt: skip


def stream_generate(
    model,
    tokenizer,
    prompt: str | mx.array | list[int],
    max_tokens: int = 256,
    *,
    snapkv: SnapKV | dict[str, Any] | str | bool | None = None,
    policy: Policy | str | None = None,
    on_report: ReportCallback | None = None,
    **kwargs: Any,
) -> Iterator[Any]:
    """`mlx_lm.stream_generate` with a compressed prompt; see `generate_step` for the keywords.

    Yields:
        mlx-lm's `GenerationResponse`s; `prompt_tokens` and `prompt_tps` count the whole prompt.
    """
    chosen = resolve_policy(snapkv, policy)
    if chosen is None:
        return mlx_generate.stream_generate(model, tokenizer, prompt, max_tokens, **kwargs)
    tokens = encode_prompt(tokenizer, prompt)
    return _compressed(
        lambda options: mlx_generate.stream_generate(model, tokenizer, tokens, max_tokens, **options),
        model, len(tokens), chosen, on_report, kwargs,
    )  # fmt: skip


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
            f"Peak memory: {response.peak_memory:.3f} GB"
        )
        for report in reports:
            print(f"Compression: {report}")
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


def _compressed(
    start: Callable[[dict[str, Any]], Iterable[Any]],
    model,
    n_prompt: int,
    policy: Policy,
    on_report: ReportCallback | None,
    options: dict[str, Any],
) -> Iterator[Any]:
    """mlx-lm's own iterator, `start(options)`, with the cut made between two of its steps."""
    on_report = on_report or (lambda report: None)
    if n_prompt == 0 and options.get("input_embeddings") is None:
        raise SnapKVError("the prompt is empty: give at least one token")
    prompt_cache = options.get("prompt_cache")
    reason = gate(policy, n_prompt, prompt_cache)
    if reason is not None:
        on_report(CompressionReport(str(policy), n_prompt, reason))
        return iter(start(options))
    for name, message in _CONFLICTS.items():
        if options.get(name) is not None:
            raise SnapKVError(message)
    if prompt_cache is None:
        prompt_cache = make_prompt_cache(model)
    lookahead = DEFAULT_LOOKAHEAD if policy.lookahead is None else policy.lookahead
    last = n_prompt + lookahead if policy.last_token else n_prompt - 1
    request = RecordedRequest(model, policy, n_prompt, prompt_cache, last)
    options = options | {"prompt_cache": request.caches}
    if policy.prefill_chunk is not None:
        options["prefill_step_size"] = policy.prefill_chunk
    if policy.last_token:
        return _cut_at_token(start, request, max(1, lookahead), on_report, options)
    return _cut_before_last_token(start, request, on_report, options)


def _cut_at_token(start, request: RecordedRequest, n: int, on_report, options) -> Iterator[Any]:
    """Cut when the `n`-th token is about to be yielded: mlx-lm has fed it by then, so its query is there."""
    items = iter(start(options))
    try:
        with request.recording():
            for _ in range(n - 1):
                item = next(items, None)
                if item is None:
                    break
                yield item
            item = next(items, None)
    except GeneratorExit:
        # The reader has its answer: leave its cache compressed, not empty.
        on_report(request.cut())
        raise
    on_report(request.cut())
    if item is not None:
        yield item
        yield from items


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

        yield from start(options | {"prompt_progress_callback": callback})
