"""Continuous batching with compressed caches, based on mlx-lm's `BatchGenerator`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator, PromptProcessingBatch, greedy_sampler
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import all_caches
from ..compress.policies import SnapKV
from ..compress.policy import Policy
from ..engine.loop_model import PacedModel
from ..engine.serving import require_servable
from ..entries.quantization import without_quantization
from ..errors import UnsupportedModelError
from ..models import type_of
from ..planning.config import CompressionConfig
from ..planning.prompt_plan import MAX_TOKENS
from ..planning.request_plan import FULL_CACHE_REASON, SLOWER_REASON, Plan, plan_request
from ..planning.settings import Setting
from ..planning.speed_record import speed_of
from ..sparse.options import Sparse
from .groups import Groups, Guard, Single, model_and_caches, request_errors
from .job import BatchReport, Job, OnRead

# Model types that mlx-lm 0.32 can't batch, or batches incorrectly.
UNBATCHED_TYPES = ("gemma2", "gpt_bigcode", "llama4", "longcat_flash_ngram", "nemotron-nas")


def require_batchable(model) -> None:
    """Check that mlx-lm can decode several prompts together with this model.

    Raises: UnsupportedModelError: mlx-lm can't, or the answers would be wrong.
    """
    caches = all_caches(make_prompt_cache(model))
    if type_of(model) in UNBATCHED_TYPES or not all(hasattr(cache, "merge") for cache in caches):
        raise UnsupportedModelError(
            f"mlx-lm can't decode several prompts together with models of type {type_of(model)!r}: "
            "answer them one at a time"
        )


class CompressedBatchGenerator(BatchGenerator):
    """A version of mlx-lm's `BatchGenerator` with compressed caches.

    Prompts are read and compressed one at a time, as in `generate_step`, regardless of `prefill_batch_size`. Prompts
    shorter than the policy's `min_ctx` keep their full cache. Once their prompts have been read, requests decode
    together if their caches have similar lengths.

    With greedy sampling, every request gets the same answer as outside the batch. The exception is sparse attention
    with when="faster", because a batch does not measure speed.

    If a request fails, its last response has the finish reason "error" and the exception in `error`. Other requests
    continue.

    Args:
        model: an mlx-lm model.
        snapkv: see `generate_step`. If none of `snapkv`, `policy`, `sparse` and `turns` is set, this is just mlx-lm's
            generator.
        policy: see `generate_step`; "auto" is not supported.
        sparse: see `generate_step`.
        on_report: called with a request's uid and its `CompressionReport`.
        on_read: called after a prompt has been read, with the request's uid, its full caches, and the tokens in these
            caches. Other requests can continue from these caches. Not called for prompts that keep their full cache, or
            if the policy evicts during prefill.
        turns: whether to compress prompt caches that already contain tokens, as in a `Conversation`.
        reads_first: whether requests decode together only while the batch is full or no prompt is left to read. Answers
            arrive later, but fewer decode steps are needed.
        on_pause: called about once a second while a long chunk is read. It must accept two arguments, which have no
            meaning. If it raises an exception, the request fails.
        **kwargs: `kv_bits` and `kv_group_size` for the compressed entries, and keyword arguments for mlx-lm.

    Raises:
        SnapKVError: options conflict, or the model is not supported. `insert` also raises it for requests that are not
            supported.
    """

    _old_wired_limit = None  # mlx-lm's `close` needs this even if `__init__` has failed

    def __init__(
        self,
        model,
        *,
        snapkv: SnapKV | dict[str, Any] | str | bool | None = None,
        policy: Policy | Setting | str | None = None,
        sparse: Sparse | dict[str, Any] | str | bool | None = None,
        on_report: BatchReport | None = None,
        on_read: OnRead | None = None,
        turns: bool = False,
        reads_first: bool = False,
        on_pause: Callable[[int, int], None] = lambda done, total: None,
        **kwargs: Any,
    ):
        """Check the options and the model."""
        setting: dict[str, Any] = {"snapkv": snapkv, "policy": policy, "sparse": sparse}
        config, kwargs = CompressionConfig.from_keywords(kwargs | setting, turns=turns)
        mlx_options = without_quantization(kwargs)  # mlx-lm's generator does not quantise
        self._plans: dict[int, Plan] = {}  # uid -> plan of a waiting request
        self._is_plain = config.setting is None and not turns  # whether mlx-lm does everything
        if self._is_plain:
            config.require_supported(model)
            super().__init__(model, **mlx_options)
            return
        require_servable(model, config)
        require_batchable(model)
        super().__init__(model, **mlx_options | {"prefill_batch_size": 1})
        self._config = config
        self._on_report = on_report or (lambda uid, report: None)
        self._on_read = on_read
        self._max_step_size = self.prefill_step_size
        self._prompt_batch = PromptBatch.empty(model, self.sampler)
        self._generation_batch = Groups()
        self._reads_first = reads_first
        self._on_pause = on_pause

    def insert_segments(
        self,
        segments: list[list[list[int]]],
        max_tokens: list[int] | None = None,
        caches: list[list[Any]] | None = None,
        all_tokens: list[list[int]] | None = None,
        samplers: Any = None,
        logits_processors: list[list[Callable]] | None = None,
        stop_sequences: list[Any] | None = None,
        *,
        in_full: bool = False,
    ) -> list[int]:
        """Add requests, like mlx-lm's `insert_segments`.

        Args:
            segments: token ids of each prompt, in segments. A chunk never spans two segments.
            max_tokens: maximum length of each answer in tokens. By default, the generator's `max_tokens`.
            caches: the caches that each request continues from. They are copied. By default, all caches are new.
            all_tokens: for each request, the tokens that its caches contain.
            samplers: a sampler for each request. By default, the generator's sampler.
            logits_processors: logits processors for each request.
            stop_sequences: for each request, token sequences that end the answer.
            in_full: whether to ignore the policy and answer from full caches.
        """
        plans: list[Plan] = []
        if not self._is_plain:
            caches = caches or [[] for _ in segments]
            caches = [cache or make_prompt_cache(self.model) for cache in caches]
            max_tokens = max_tokens or [self.max_tokens] * len(segments)
            prompt_lengths = [sum(map(len, prompt_segments)) for prompt_segments in segments]
            plans = self._make_plans(prompt_lengths, caches, max_tokens, in_full)
            samplers = [sampler and Guard(sampler, greedy_sampler) for sampler in samplers or []]
            logits_processors = [
                [Guard(processor, lambda logits: logits) for processor in processors or ()]
                for processors in logits_processors or []
            ]
        uids = super().insert_segments(
            segments, max_tokens, caches, all_tokens, samplers, logits_processors, stop_sequences
        )
        self._plans.update(zip(uids, plans))
        return uids

    def _make_plans(
        self,
        prompt_lengths: list[int],
        caches: list[list[Any]],
        max_tokens: list[int],
        in_full: bool,
    ) -> list[Plan]:
        """Plan the requests. Empty prompts are skipped, because mlx-lm rejects them anyway.

        Args:
            prompt_lengths: length of each prompt in tokens.
            caches: the caches that each request continues from.
            max_tokens: maximum length of each answer in tokens.
            in_full: see `insert_segments`.

        Raises: SnapKVError: a request is not supported.
        """
        config = CompressionConfig(turns=self._config.turns) if in_full else self._config
        plans = []
        for n_prompt, cache, n_answer in zip(prompt_lengths, caches, max_tokens):
            if n_prompt == 0:
                continue
            plan = plan_request(self.model, config, n_prompt, cache, max_tokens=n_answer)
            if plan.adapts:
                # Batched requests decode in lockstep, so a request can't switch to full attention later: decide now.
                plan = replace(plan, adapts=False, reason=self._slower_reason(plan, n_answer))
            plans.append(replace(plan, reason=FULL_CACHE_REASON) if in_full else plan)
        return plans

    def _slower_reason(self, plan: Plan, max_tokens: int) -> str | None:
        """Return `SLOWER_REASON` if sparse attention is known to be slower for a request, otherwise None."""
        assert plan.sparse is not None
        n_answer = min(max_tokens, MAX_TOKENS)
        speed = speed_of(self.model, plan.sparse)
        has_index = plan.n_earlier > 0
        is_slower = speed.is_sparse_slower(plan.n_prompt, n_answer, has_index)
        return SLOWER_REASON if is_slower else None

    def _next(self) -> Any:
        """Run one step, like mlx-lm.

        With `reads_first`, requests don't decode together while a prompt is being read, or while the batch has room for
        a request that is still waiting.
        """
        if not self._is_plain and self._reads_first:
            groups = self._generation_batch
            is_reading = len(self._prompt_batch) > 0
            has_room = len(groups) < self.completion_batch_size
            will_read = has_room and len(self._unprocessed_sequences) > 0
            groups.only_uncompressed = is_reading or will_read
        prompts, responses = super()._next()
        if any(response.finish_reason is not None for response in responses):
            mx.clear_cache()  # MLX keeps freed buffers, but the remaining groups need other sizes
        return prompts, responses

    def remove(self, uids: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        """Remove requests, like mlx-lm's `remove`, and return their memory to the operating system."""
        result = super().remove(uids, *args, **kwargs)
        for uid in uids:
            self._plans.pop(uid, None)
        mx.clear_cache()
        return result

    def read_so_far(self, uid: int) -> tuple[list, list[int]] | None:
        """Return copies of a request's caches during prefill, and the tokens read so far.

        Other requests can continue from the copies. Return None if the request is waiting, decoding or has failed, or
        if this is just mlx-lm's generator.
        """
        batch = self._prompt_batch
        if self._is_plain or uid not in batch.uids or batch.job.error is not None:
            return None
        return batch.extract_cache(0), list(batch.tokens[0])

    def _make_batch(self, n: int) -> Any:
        """Start the next waiting request, and return a batch whose `Job` reads the prompt."""
        if self._is_plain:
            return super()._make_batch(n)
        uid, segments, max_tokens, prompt_cache, *other_fields = self._unprocessed_sequences[0]
        # Only the job gets the caches, because mlx-lm would merge them.
        self._unprocessed_sequences[0] = (uid, segments, max_tokens, [], *other_fields)
        plan = self._plans.pop(uid)
        job = Job(self.model, uid, plan, prompt_cache, self._on_report, self._on_read)
        self.prefill_step_size = plan.chunk_size(self._max_step_size)
        batch = super()._make_batch(n)
        batch.model = PacedModel(job.loop_model, self._on_pause)
        batch.job = job
        batch.prompt_cache = job.caches
        return batch


class PromptBatch(PromptProcessingBatch):
    """A version of mlx-lm's prompt batch that reads one prompt at a time.

    Reading several prompts together would need memory for all of their full caches. It would also take longer, because
    mlx-lm pads every prompt to the longest one.
    """

    job: Job

    def extend(self, batch: Any) -> None:
        """Take over another batch's prompt. This batch must be empty."""
        assert not self.uids, "prompts are read one at a time"
        vars(self).update(vars(batch))

    def split(self, indices: list[int]) -> PromptBatch:
        """Move the prompt to a new batch. Unlike in mlx-lm, the caches are not copied."""
        batch = copy.copy(self)
        self.filter([])
        return batch

    def filter(self, keep: list[int]) -> None:
        """Keep the prompt, or drop it if `keep` is empty."""
        if not keep:
            # Assign a new list, because mlx-lm would clear the old one, which the job still needs.
            self.prompt_cache = []
        super().filter(keep)

    def prompt(self, tokens: list[list[int]]) -> None:
        """Read the prompt's next tokens. If that fails, store the exception in `job.error`."""
        if not tokens or self.job.error is not None:
            return
        try:
            with self.job.recording():
                super().prompt(tokens)
        except request_errors() as error:
            self.job.error = error

    def generate(self, tokens: list[list[int]]) -> Single:
        """Read the prompt's last tokens, unless the request has already failed.

        Return a group that contains only this request, failed or not.
        """
        job = self.job
        single: Any = Single.empty(job.model, self.fallback_sampler)
        single.job = job
        single.uids = self.uids
        single.tokens = self.tokens
        if job.error is None:
            try:
                self.model, self.prompt_cache = model_and_caches(job)
                with job.recording():
                    vars(single).update(vars(super().generate(tokens)))
            except request_errors() as error:
                job.error = error
        return single

    def extract_cache(self, idx: int) -> list[Any]:
        """Return copies of the caches, which contain the tokens read so far. `idx` must be 0."""
        return self.job.copy_caches()
