"""mlx-lm's `generate_step`, `stream_generate` and `generate`, with compression or sparse attention."""

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
from .draft_model import DraftedAnswer, require_growing
from .prefill import mlx_generate
from .report import CompressionReport
from .serving import ReportCallback, serve
from .token_ids import require_known, token_ids
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
    """Call `mlx_lm.generate.generate_step`, and compress the prompt once it has been read.

    Args:
        prompt: `(T,)` token ids.
        model: an mlx-lm model.
        snapkv: a `SnapKV`, or its options as a dict or a `"key=value,..."` string.
        policy: a policy object, or a string such as `"keydiff:budget=8192"`. "auto", like `snapkv=True`, selects what
            docs/choose.md recommends for the prompt and this machine.
        sparse: sparse attention instead of a policy: True, a `Sparse`, or its options as a dict or a `"key=value,..."`
            string. No entry is evicted; prompt chunks and answer tokens choose the few entries that they read.
        on_report: called with a `CompressionReport`, before the first token from the compressed cache.
        **kwargs: mlx-lm's keywords.
        stream: mlx-lm's argument.

    Yields: Tokens and their log-probabilities `(vocab_size,)`, like mlx-lm.

    Raises: SnapKVError: at the call, if options conflict or the model is not supported. Warns: TrainedLengthWarning:
    the prompt is longer than the model was trained for.
    """
    if isinstance(stream, int):
        raise SnapKVError(
            f"generate_step's third argument is mlx-lm's stream: give max_tokens={stream}"
        )
    if stream is not None:
        kwargs["stream"] = stream
    prompt = token_ids(prompt, may_be_empty=kwargs.get("input_embeddings") is not None)
    require_known(prompt, model)
    start = functools.partial(mlx_generate.generate_step, prompt)
    n = len(prompt)
    max_tokens = kwargs.get("max_tokens", MAX_TOKENS)
    config, on_report, options = _resolve_keywords(
        model, n, max_tokens, snapkv, policy, sparse, on_report, kwargs
    )
    return serve(start, model, n, max_tokens, config, on_report, options)


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
    """Call `mlx_lm.stream_generate`, and compress the prompt; see `generate_step` for the keywords.

    With a draft model, only the main model's cache is compressed. The main model decodes alone until the first token
    after the compression. The greedy answer is the same as without a draft model.

    Yields:
        mlx-lm's `GenerationResponse`s. `prompt_tokens` and `prompt_tps` count the whole prompt, and `generation_tps`
        excludes the time of the compression.
    """
    tokens = encode_prompt(tokenizer, prompt)
    n = len(token_ids(tokens, may_be_empty=kwargs.get("input_embeddings") is not None))
    require_known(tokens, model)
    kwargs |= {"draft_model": draft_model}
    config, on_report, options = _resolve_keywords(
        model, n, max_tokens, snapkv, policy, sparse, on_report, kwargs
    )
    options.pop("draft_model")

    def start_answer(tokenizer, options: dict[str, Any], on_report) -> Iterator[GenerationResponse]:
        start = functools.partial(
            mlx_generate.stream_generate, tokenizer=tokenizer, prompt=tokens, max_tokens=max_tokens
        )
        return serve(start, model, n, max_tokens, config, on_report, options)

    if draft_model is None:
        return start_answer(tokenizer, options, on_report)
    plan = _plan_beside_draft(model, n, max_tokens, config, options)
    if plan.reason is None:
        answer = DraftedAnswer(model, draft_model, tokenizer, tokens, max_tokens, plan, options)
        return answer.responses(start_answer, on_report)
    return start_answer(tokenizer, {"draft_model": draft_model, **options}, on_report)


def _plan_beside_draft(
    model, n: int, max_tokens: int, config: CompressionConfig, options: dict[str, Any]
) -> Plan:
    """Plan a prompt of `n` tokens for the main model; a given prompt cache also has the draft model's caches.

    Raises: SnapKVError: a cache of the main model does more than grow.
    """
    cache = options.get("prompt_cache")
    require_growing(model, cache)
    return plan_request(
        model,
        config,
        n,
        cache,
        max_tokens=max_tokens,
        is_embedded=options.get("input_embeddings") is not None,
        layers=attention_layers(model, make_prompt_cache(model)),
    )


def generate(
    model, tokenizer, prompt: str | list[int], verbose: bool = False, **kwargs: Any
) -> str:
    """Return the whole answer as a string, like `mlx_lm.generate`, but compress the prompt.

    Args:
        model: an mlx-lm model.
        tokenizer: its tokenizer.
        prompt: a text, to which no chat template is applied, or token ids.
        verbose: print the text while it is generated, and then the figures.
        **kwargs: keywords of `stream_generate`.
    """
    callback = kwargs.pop("on_report", None) or (lambda report: None)
    reports: list[CompressionReport] = []

    def on_report(report: CompressionReport) -> None:
        reports.append(report)
        callback(report)

    text = ""
    response = None
    for response in stream_generate(model, tokenizer, prompt, on_report=on_report, **kwargs):
        text += response.text
        if verbose:
            print(response.text, end="", flush=True)
    if verbose and response is not None:
        print(f"{figures(response)}\nCompression: {reports[0]}")
    return text


def _resolve_keywords(
    model: Any,
    n_prompt: int,
    max_tokens: int,
    snapkv: Any,
    policy: Any,
    sparse: Any,
    on_report: ReportCallback | None,
    options: dict[str, Any],
) -> tuple[CompressionConfig, ReportCallback, dict[str, Any]]:
    """Resolve the keywords to a config, a callback for the report, and mlx-lm's keywords.

    For "auto" and `snapkv=True` the callback adds the selected setting to the report.
    """
    config, options, choice = resolve(
        model,
        n_prompt,
        QUESTION,
        options,
        snapkv=snapkv,
        policy=policy,
        sparse=sparse,
        max_tokens=max_tokens,
    )
    return config, explaining(choice, on_report), options


def figures(response: Any) -> str:
    """Return the figures of a response, or of a batch, in the words of mlx-lm."""
    return (
        f"\nPrompt: {response.prompt_tokens} tokens, {response.prompt_tps:.3f} tokens-per-sec\n"
        f"Generation: {response.generation_tokens} tokens, "
        f"{response.generation_tps:.3f} tokens-per-sec\n"
        f"Peak memory: {response.peak_memory:.3f} GB"
    )


def encode_prompt(tokenizer, prompt: str | mx.array | list[int]) -> mx.array:
    """Return the token ids `(T,)` of a prompt, with the special tokens that mlx-lm's `stream_generate` adds."""
    if isinstance(prompt, str):
        return mx.array(text_tokens(tokenizer, prompt))
    return token_ids(prompt, may_be_empty=True)


def text_tokens(tokenizer, text: str) -> list[int]:
    """Return the token ids of a text, with the special tokens that mlx-lm's `stream_generate` adds."""
    if not isinstance(tokenizer, TokenizerWrapper):
        tokenizer = TokenizerWrapper(tokenizer)
    ignore_length_limit(tokenizer)
    bos = tokenizer.bos_token
    special = bos is None or not text.startswith(bos)
    return tokenizer.encode(text, add_special_tokens=special)
