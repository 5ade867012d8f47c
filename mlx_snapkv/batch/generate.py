"""Answer several prompts together: mlx-lm's `batch_generate` with compression or sparse attention."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import BatchResponse as MlxBatchResponse
from mlx_lm.generate import BatchStats
from mlx_lm.generate import batch_generate as mlx_batch_generate

from ..compress.options import Compress
from ..compress.policies import SnapKV
from ..compress.policy import Policy
from ..engine.generate import figures
from ..engine.report import NO_POLICY, CompressionReport
from ..engine.token_ids import require_known, token_ids
from ..entries.quantization import extract_quantization
from ..errors import SnapKVError
from ..models.trained_length import warn_beyond_trained_length
from ..planning.auto import BATCH, explaining, resolve
from ..planning.config import CompressionConfig
from ..planning.request_plan import NO_POLICY_REASON
from ..sparse.options import Sparse
from .generator import CompressedBatchGenerator


@dataclass
class BatchResponse(MlxBatchResponse):
    """mlx-lm's response, with errors.

    Attributes:
        errors: the exception that ended the answer to each prompt, or None.
    """

    errors: list[Exception | None] = field(default_factory=list)


def batch_generate(
    model,
    tokenizer,
    prompts: Sequence[Sequence[int]],
    prompt_caches: list[list[Any]] | None = None,
    max_tokens: int | list[int] = 128,
    verbose: bool = False,
    return_prompt_caches: bool = False,
    return_token_ids: bool = False,
    return_logprobs: bool = False,
    *,
    snapkv: SnapKV | dict[str, Any] | str | bool | None = None,
    policy: Policy | Compress | str | None = None,
    sparse: Sparse | dict[str, Any] | str | bool | None = None,
    on_report: Callable[[CompressionReport], None] | None = None,
    **kwargs: Any,
) -> MlxBatchResponse:
    """Call `mlx_lm.batch_generate`, and compress the prompts. Without a policy, mlx-lm's own function is called.

    Args:
        model: an mlx-lm model.
        tokenizer: its tokenizer, which decodes the answers.
        prompts: token ids of each prompt, at least one.
        prompt_caches: caches that each prompt continues; None starts with empty caches.
        max_tokens: maximum number of tokens of an answer, for all prompts or for each.
        verbose: whether to print the number of answers and the speed.
        return_prompt_caches: whether the response contains the caches after each answer.
        return_token_ids: whether the response contains the token ids of each answer.
        return_logprobs: whether the response contains the log-probability of each token.
        snapkv: see `generate_step`.
        policy: see `generate_step`.
        sparse: see `generate_step`.
        on_report: called with a `CompressionReport` for each prompt, in the order of the prompts.
        **kwargs: the options of `CompressedBatchGenerator`.

    Returns:
        mlx-lm's response; with a policy a `BatchResponse`. A prompt that does not fail gets the same answer as alone.

    Raises: SnapKVError: options, models or prompts can't be served; nothing has been read then.
    """
    token_lists = _token_lists(model, prompts)
    limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    longest = max(map(len, token_lists), default=0)
    warn_beyond_trained_length(model, longest)
    config, options, recommendation = resolve(
        model,
        longest,
        BATCH,
        kwargs,
        snapkv=snapkv,
        policy=policy,
        sparse=sparse,
        max_tokens=max(limits, default=0),
    )
    report_to = explaining(recommendation, on_report)
    if config.setting is None:
        config.require(model)
        _, mlx_options = extract_quantization(options)  # mlx-lm's batches don't quantise
        for prompt in token_lists:
            report_to(CompressionReport(NO_POLICY, len(prompt), NO_POLICY_REASON))
        return mlx_batch_generate(
            model,
            tokenizer,
            token_lists,
            prompt_caches,
            max_tokens,
            verbose,
            return_prompt_caches,
            return_token_ids,
            return_logprobs,
            **mlx_options,
        )
    answers, stats = _answer_all(
        model, tokenizer, token_lists, limits, prompt_caches, config, options, return_logprobs
    )
    for answer in answers:
        if answer.report is not None:
            report_to(answer.report)
    if verbose:
        print(f"{len(token_lists)} of {len(token_lists)} prompts answered{figures(stats)}")
    return _response(
        tokenizer, answers, stats, return_prompt_caches, return_token_ids, return_logprobs
    )


def _token_lists(model, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the token ids of the prompts as lists.

    Raises: SnapKVError: a prompt is empty, or has a token that is not in the model's vocabulary.
    """
    token_lists: list[Any] = []
    for prompt in prompts:
        tokens = token_ids(prompt, may_be_empty=True)
        require_known(tokens, model)
        token_lists.append(tokens.tolist())
    if [] in token_lists:
        raise SnapKVError(f"prompt {token_lists.index([])} is empty: give at least one token")
    return token_lists


@dataclass
class _Answer:
    """The answer to one prompt."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_cache: list[Any] = field(default_factory=list)
    error: Exception | None = None
    report: CompressionReport | None = None

    def add(self, response: Any, with_logprobs: bool) -> None:
        """Add a response of the generator. Its token is part of the answer unless it stops the answer."""
        self.prompt_cache = response.prompt_cache or []
        self.error = response.error
        if response.finish_reason in (None, "length"):
            self.tokens.append(response.token)
            if with_logprobs:
                self.logprobs.append(response.logprobs[response.token].item())


def _answer_all(
    model,
    tokenizer,
    prompts: list[list[int]],
    limits: list[int],
    prompt_caches: list[list[Any]] | None,
    config: CompressionConfig,
    options: dict[str, Any],
    with_logprobs: bool,
) -> tuple[list[_Answer], BatchStats]:
    """Answer the prompts with `CompressedBatchGenerator`, and return the answers and mlx-lm's statistics.

    Args:
        model: an mlx-lm model.
        tokenizer: its tokenizer, whose end-of-sequence tokens stop an answer.
        prompts: token ids of each prompt.
        limits: maximum number of tokens of each answer.
        prompt_caches: caches that each prompt continues; None starts with empty caches.
        config: the config of all prompts.
        options: mlx-lm's keywords for the generator.
        with_logprobs: whether to keep the log-probability of each token.
    """
    answers = [_Answer() for _ in prompts]
    generator = CompressedBatchGenerator(
        model,
        policy=config.setting,
        stop_tokens=[[token] for token in tokenizer.eos_token_ids],
        on_report=lambda uid, report: setattr(answers[uid], "report", report),
        reads_first=True,
        **options,
    )
    with contextlib.closing(generator), generator.stats() as stats:
        generator.insert(prompts, limits, caches=prompt_caches)  # requests are numbered from 0
        while responses := generator.next_generated():
            for response in responses:
                answers[response.uid].add(response, with_logprobs)
    return answers, stats


def _response(
    tokenizer,
    answers: list[_Answer],
    stats: BatchStats,
    with_prompt_caches: bool,
    with_token_ids: bool,
    with_logprobs: bool,
) -> BatchResponse:
    """Return mlx-lm's response for the answers. Parts that were not requested are None."""
    return BatchResponse(
        texts=[tokenizer.decode(answer.tokens) for answer in answers],
        stats=stats,
        caches=[answer.prompt_cache for answer in answers] if with_prompt_caches else None,
        token_ids=[answer.tokens for answer in answers] if with_token_ids else None,
        logprobs=[answer.logprobs for answer in answers] if with_logprobs else None,
        errors=[answer.error for answer in answers],
    )
