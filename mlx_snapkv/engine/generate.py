"""Drop-in versions of mlx-lm's `generate_step`, `stream_generate` and `generate` that compress the prompt cache."""

import functools
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..caches.layers import attention_layers
from ..compress.options import Compress
from ..compress.policies import SnapKV
from ..compress.policy import Policy
from ..errors import SnapKVError
from ..planning.auto import QUESTION, explaining, resolve
from ..planning.config import CompressionConfig
from ..planning.prompt_plan import MAX_TOKENS
from ..planning.request_plan import Plan, plan_request
from ..sparse.options import Sparse
from .draft_model import DraftedAnswer, require_trimmable
from .prefill import mlx_generate
from .report import CompressionReport
from .serving import ReportCallback, serve
from .token_ids import require_known_tokens, token_ids
from .tokenizer_limit import ignore_length_limit


def generate_step(
    prompt: mx.array | list[int],
    model,
    stream: Any = None,
    *,
    snapkv: SnapKV | dict[str, Any] | str | bool | None = None,
    policy: Policy | Compress | str | None = None,
    sparse: Sparse | dict[str, Any] | str | bool | None = None,
    on_report: ReportCallback | None = None,
    **kwargs: Any,
) -> Iterator[tuple[int, mx.array]]:
    """Run `mlx_lm.generate.generate_step`, and compress the prompt cache after prefill.

    Args:
        prompt: token ids, `(T,)`.
        model: an mlx-lm model.
        stream: mlx-lm's `stream` argument.
        snapkv: a `SnapKV`, or its options as a dict or a `"key=value,..."` string. True means policy="auto".
        policy: a policy object, or a string such as `"keydiff:budget=8192"`. "auto" picks the setting that
            docs/choose.md recommends for this prompt and machine.
        sparse: sparse attention instead of a policy: True, a `Sparse`, or its options as a dict or a `"key=value,..."`
            string. Nothing is evicted. Instead, answer tokens read only some of the entries, by default only while
            that is faster. If entries are in files, prompt chunks do so, too.
        on_report: called with the `CompressionReport` before the first token from the compressed cache is yielded.
        **kwargs: keyword arguments for mlx-lm.

    Yields: Tokens and their log-probabilities `(vocab_size,)`, like mlx-lm.

    Raises:
        SnapKVError: the prompt or an option is invalid, options conflict, or the model is not supported. The call
            itself raises these errors. Later problems, such as NaN scores, raise an error during iteration.

    Warns: TrainedLengthWarning: the prompt is longer than the model's trained length.
    """
    if isinstance(stream, int):
        raise SnapKVError(
            f"generate_step's third argument is mlx-lm's stream: give max_tokens={stream}"
        )
    if stream is not None:
        kwargs["stream"] = stream
    prompt = token_ids(prompt, may_be_empty=kwargs.get("input_embeddings") is not None)
    require_known_tokens(prompt, model)
    start = functools.partial(mlx_generate.generate_step, prompt)
    n_prompt = len(prompt)
    max_tokens = kwargs.get("max_tokens", MAX_TOKENS)
    config, options, recommendation = resolve(
        model,
        n_prompt,
        QUESTION,
        kwargs,
        snapkv=snapkv,
        policy=policy,
        sparse=sparse,
        max_tokens=max_tokens,
    )
    on_report = explaining(recommendation, on_report)
    return serve(start, model, n_prompt, max_tokens, config, on_report, options)


def stream_generate(
    model,
    tokenizer,
    prompt: str | mx.array | list[int],
    max_tokens: int = MAX_TOKENS,
    draft_model: Any = None,
    *,
    snapkv: SnapKV | dict[str, Any] | str | bool | None = None,
    policy: Policy | Compress | str | None = None,
    sparse: Sparse | dict[str, Any] | str | bool | None = None,
    on_report: ReportCallback | None = None,
    **kwargs: Any,
) -> Iterator[GenerationResponse]:
    """Run `mlx_lm.stream_generate`, and compress the prompt cache after prefill.

    See `generate_step` for the keyword arguments.

    With a draft model, only the main model's cache is compressed. Speculative decoding starts with the first token from
    the compressed cache. With greedy sampling, the answer is the same as without a draft model.

    Yields:
        mlx-lm's `GenerationResponse`s. `prompt_tokens` and `prompt_tps` cover the whole prompt. `generation_tps`
        excludes the time spent on compression.
    """
    tokens = encode_prompt(
        tokenizer, prompt, may_be_empty=kwargs.get("input_embeddings") is not None
    )
    n_prompt = tokens.size
    require_known_tokens(tokens, model)
    config, options, recommendation = resolve(
        model,
        n_prompt,
        QUESTION,
        kwargs | {"draft_model": draft_model},
        snapkv=snapkv,
        policy=policy,
        sparse=sparse,
        max_tokens=max_tokens,
    )
    on_report = explaining(recommendation, on_report)
    options.pop("draft_model")

    def start_answer(tokenizer, options: dict[str, Any], on_report) -> Iterator[GenerationResponse]:
        start = functools.partial(
            mlx_generate.stream_generate, tokenizer=tokenizer, prompt=tokens, max_tokens=max_tokens
        )
        return serve(start, model, n_prompt, max_tokens, config, on_report, options)

    if draft_model is None:
        return start_answer(tokenizer, options, on_report)
    plan = _plan_main_model(model, n_prompt, max_tokens, config, options)
    if plan.is_left_to_mlx_lm:
        return start_answer(tokenizer, {"draft_model": draft_model, **options}, on_report)
    answer = DraftedAnswer(model, draft_model, tokenizer, tokens, max_tokens, plan, options)
    return answer.responses(start_answer, on_report)


def _plan_main_model(
    model, n_prompt: int, max_tokens: int, config: CompressionConfig, options: dict[str, Any]
) -> Plan:
    """Plan a prompt of `n_prompt` tokens for the main model.

    Raises: SnapKVError: the request can't be planned, or rejected drafts can't be trimmed from one of the main model's
        caches.
    """
    prompt_cache = options.get("prompt_cache")
    require_trimmable(model, prompt_cache)
    return plan_request(
        model,
        config,
        n_prompt,
        prompt_cache,
        max_tokens=max_tokens,
        is_embedded=options.get("input_embeddings") is not None,
        # Find the layers with new caches, because `prompt_cache` also contains the draft model's caches.
        layers=attention_layers(model, make_prompt_cache(model)),
    )


def generate(
    model, tokenizer, prompt: str | list[int], verbose: bool = False, **kwargs: Any
) -> str:
    """Return the whole answer as a string, like `mlx_lm.generate`, but compress the prompt cache.

    Args:
        model: an mlx-lm model.
        tokenizer: the model's tokenizer.
        prompt: text or token ids. No chat template is applied.
        verbose: print the text as it is generated, followed by speeds, peak memory and the compression report.
        **kwargs: keyword arguments for `stream_generate`.
    """
    callers_callback = kwargs.pop("on_report", None) or (lambda report: None)
    reports: list[CompressionReport] = []

    def add_report(report: CompressionReport) -> None:
        reports.append(report)
        callers_callback(report)

    text = ""
    response = None
    for response in stream_generate(model, tokenizer, prompt, on_report=add_report, **kwargs):
        text += response.text
        if verbose:
            print(response.text, end="", flush=True)
    if verbose and response is not None:
        print(f"{speed_text(response)}\nCompression: {reports[0]}")
    return text


def speed_text(response: Any) -> str:
    """Format the speeds and peak memory of a response or a batch as mlx-lm prints them."""
    return (
        f"\nPrompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec\n"
        f"Generation: {response.generation_tokens} tokens, "
        f"{response.generation_tps:.3f} tokens-per-sec\n"
        f"Peak memory: {response.peak_memory:.3f} GB"
    )


def encode_prompt(
    tokenizer, prompt: str | mx.array | list[int], may_be_empty: bool = False
) -> mx.array:
    """Return the prompt's token ids `(T,)`. Text is encoded as in mlx-lm's `stream_generate`.

    Raises: SnapKVError: the prompt is not a sequence of token ids, or is empty although `may_be_empty` is false.
    """
    tokens = text_tokens(tokenizer, prompt) if isinstance(prompt, str) else prompt
    return token_ids(tokens, may_be_empty)


def text_tokens(tokenizer, text: str) -> list[int]:
    """Encode text with the same special tokens as mlx-lm's `stream_generate`."""
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    ignore_length_limit(tokenizer)
    begins_with_bos = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
    return tokenizer.encode(text, add_special_tokens=not begins_with_bos)
