"""mlx-lm's `batch_generate`, with a policy."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_lm.generate import BatchResponse as MlxBatchResponse
from mlx_lm.generate import batch_generate as mlx_batch_generate

from ..engine.generate import figures
from ..engine.report import NO_POLICY, CompressionReport
from ..entries.quantization import taken_from
from ..errors import SnapKVError
from ..planning.auto import BATCH, resolve
from ..planning.request_plan import NO_POLICY_REASON
from ..policies import Policy, SnapKV, Sparse, Stages
from .generator import CompressedBatchGenerator


@dataclass
class BatchResponse(MlxBatchResponse):
    """mlx-lm's response; `errors` says, by prompt, what ended its answer before its end, or None."""

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
    policy: Policy | Stages | str | None = None,
    sparse: Sparse | dict[str, Any] | str | bool | None = None,
    on_report: Callable[[CompressionReport], None] | None = None,
    **kwargs: Any,
) -> MlxBatchResponse:
    """`mlx_lm.batch_generate` with compressed prompts; without a policy it is mlx-lm's own.

    Args:
        snapkv, policy, sparse: as of `generate_step`.
        on_report: receives one `CompressionReport` a prompt, in their order.
        **kwargs: `kv_bits`, `kv_group_size`, and mlx-lm's, for `CompressedBatchGenerator`.

    Returns:
        mlx-lm's response; with a policy a `BatchResponse`. Prompts that don't fail get the answers that they get alone.

    Raises: SnapKVError: options, models or prompts can't be served; nothing has been read then.
    """
    given = [list(prompt) for prompt in prompts]
    if [] in given:
        raise SnapKVError(f"prompt {given.index([])} is empty: give at least one token")
    longest = max(map(len, given), default=0)
    most = max_tokens if isinstance(max_tokens, int) else max(max_tokens, default=0)
    how: dict[str, Any] = {
        "snapkv": snapkv,
        "policy": policy,
        "sparse": sparse,
        "max_tokens": most,
    }
    config, others, _ = resolve(model, longest, BATCH, kwargs, **how)
    chosen = config.policy
    on_report = on_report or (lambda report: None)
    if chosen is None:
        config.require(model)
        for prompt in given:
            on_report(CompressionReport(NO_POLICY, len(prompt), NO_POLICY_REASON))
        wanted = return_prompt_caches, return_token_ids, return_logprobs
        return mlx_batch_generate(
            model,
            tokenizer,
            given,
            prompt_caches,
            max_tokens,
            verbose,
            *wanted,
            **taken_from(others)[1],
        )
    reports: dict[int, CompressionReport] = {}
    stops = [[token] for token in tokenizer.eos_token_ids]
    others |= {"policy": chosen, "stop_tokens": stops, "on_report": reports.__setitem__}
    generator = CompressedBatchGenerator(model, reads_first=True, **config.retention, **others)
    with contextlib.closing(generator), generator.stats() as stats:
        answers = [_Answer() for _ in given]
        limits = [max_tokens] * len(given) if isinstance(max_tokens, int) else max_tokens
        generator.insert(given, limits, caches=prompt_caches)  # which numbers them from 0
        while responses := generator.next_generated():
            for response in responses:
                answers[response.uid].add(response, return_logprobs)
    for uid in sorted(reports):
        on_report(reports[uid])
    if verbose:
        print(f"{len(given)} of {len(given)} prompts answered{figures(stats)}")
    return BatchResponse(
        [tokenizer.decode(answer.tokens) for answer in answers],
        stats,
        [answer.prompt_cache for answer in answers] if return_prompt_caches else None,
        [answer.tokens for answer in answers] if return_token_ids else None,
        [answer.logprobs for answer in answers] if return_logprobs else None,
        [answer.error for answer in answers],
    )


@dataclass
class _Answer:
    """What has come of one prompt so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    prompt_cache: list[Any] = field(default_factory=list)
    error: Exception | None = None

    def add(self, response: Any, with_logprobs: bool) -> None:
        self.prompt_cache, self.error = response.prompt_cache or [], response.error
        if response.finish_reason in (None, "length"):
            self.tokens.append(response.token)
            if with_logprobs:
                self.logprobs.append(response.logprobs[response.token].item())
