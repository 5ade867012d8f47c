"""A drop-in replacement for mlx-lm's `batch_generate`, with compression or sparse attention."""

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
from ..engine.generate import speed_text
from ..engine.report import NO_POLICY, CompressionReport
from ..engine.token_ids import require_known_tokens, token_ids
from ..entries.quantization import without_quantization
from ..errors import SnapKVError
from ..models.trained_length import warn_beyond_trained_length
from ..planning.auto import BATCH, explaining, resolve
from ..planning.config import CompressionConfig
from ..planning.request_plan import NO_POLICY_REASON
from ..sparse.options import Sparse
from .generator import CompressedBatchGenerator


@dataclass
class BatchResponse(MlxBatchResponse):
    """mlx-lm's batch response, extended with errors.

    Attributes:
        errors: for each prompt, the exception that ended its answer, or None.
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
    """Answer several prompts together, like `mlx_lm.batch_generate`, but compress each prompt cache.

    Without a policy or sparse attention, this calls mlx-lm's function.

    Args:
        model: an mlx-lm model.
        tokenizer: the model's tokenizer.
        prompts: token ids of each prompt. Prompts must not be empty.
        prompt_caches: the caches that each prompt continues from. By default, all caches are new.
        max_tokens: maximum answer length in tokens, either one number for all prompts or one per prompt.
        verbose: whether to print the number of answers and the speed.
        return_prompt_caches: whether to return each prompt's caches, which also hold the answer.
        return_token_ids: whether to return the token ids of each answer.
        return_logprobs: whether to return the log-probability of each token.
        snapkv: see `generate_step`.
        policy: see `generate_step`.
        sparse: see `generate_step`.
        on_report: called with a `CompressionReport` for each prompt, in prompt order.
        **kwargs: options for `CompressedBatchGenerator`.

    Returns:
        mlx-lm's response or, with a policy or sparse attention, a `BatchResponse`. With greedy sampling, its answers
        are the same as outside the batch, except for sparse attention with when="faster"; see
        `CompressedBatchGenerator`.

    Raises: SnapKVError: an option, the model or a prompt is not supported. All are checked before the first prompt is
        read.
    """
    token_lists = _token_lists(model, prompts)
    answer_limits = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
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
        max_tokens=max(answer_limits, default=0),
    )
    report_to = explaining(recommendation, on_report)
    if config.setting is None:
        config.require_supported(model)
        mlx_options = without_quantization(options)  # mlx-lm does not quantise in batches
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
        model,
        tokenizer,
        token_lists,
        answer_limits,
        prompt_caches,
        config,
        options,
        return_logprobs,
    )
    for answer in answers:
        if answer.report is not None:
            report_to(answer.report)
    if verbose:
        n_answered = sum(answer.error is None for answer in answers)
        print(f"{n_answered} of {len(answers)} prompts answered{speed_text(stats)}")
    return _response(
        tokenizer, answers, stats, return_prompt_caches, return_token_ids, return_logprobs
    )


def _token_lists(model, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Convert the prompts to lists of token ids.

    Raises: SnapKVError: a prompt is empty, or has a token outside the model's vocabulary.
    """
    token_lists: list[Any] = []
    for number, prompt in enumerate(prompts):
        token_array = token_ids(prompt, may_be_empty=True)
        if token_array.size == 0:
            raise SnapKVError(f"prompt {number} is empty: give at least one token")
        require_known_tokens(token_array, model)
        token_lists.append(token_array.tolist())
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
        """Add a response from the generator. A stop token is not added to the answer."""
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
    answer_limits: list[int],
    prompt_caches: list[list[Any]] | None,
    config: CompressionConfig,
    options: dict[str, Any],
    with_logprobs: bool,
) -> tuple[list[_Answer], BatchStats]:
    """Answer the prompts with a `CompressedBatchGenerator`, and return the answers and mlx-lm's statistics.

    Args:
        model: an mlx-lm model.
        tokenizer: the model's tokenizer. Its end-of-sequence tokens stop an answer.
        prompts: token ids of each prompt.
        answer_limits: maximum length of each answer in tokens.
        prompt_caches: the caches that each prompt continues from, or None to start every prompt with new caches.
        config: the config for all prompts.
        options: the generator's other keyword arguments.
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
        generator.insert(prompts, answer_limits, caches=prompt_caches)  # uids are 0, 1, ...
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
    """Build the response. Parts that were not requested are None."""
    return BatchResponse(
        texts=[tokenizer.decode(answer.tokens) for answer in answers],
        stats=stats,
        caches=[answer.prompt_cache for answer in answers] if with_prompt_caches else None,
        token_ids=[answer.tokens for answer in answers] if with_token_ids else None,
        logprobs=[answer.logprobs for answer in answers] if with_logprobs else None,
        errors=[answer.error for answer in answers],
    )
