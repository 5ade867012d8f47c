"""mlx-lm's continuous batching on compressed caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import attention_layers, members
from ..caches.memories import make_caches
from ..caches.quantizable import require_quantizable
from ..engine.far import require_far
from ..engine.recalling import Recall, require_verifiable
from ..engine.request import held_tokens
from ..engine.serving import require_no_conflict
from ..entries.quantization import Quantization
from ..errors import UnsupportedModelError
from ..models import type_of
from ..policies import Policy, SnapKV, Stages, resolve_policy
from .groups import Groups
from .job import BatchReport, Job, Plan
from .reading import Reading
from .sampling import guarded_processor, guarded_sampler

# Model types whose batches are wrong, or an error, in mlx-lm itself (0.32).
ALONE = ("gemma2", "gpt_bigcode", "llama4", "longcat_flash_ngram", "nemotron-nas")


def require_together(model) -> None:
    """Raises: UnsupportedModelError: mlx-lm can't decode several prompts of this model together, or does it wrong."""
    caches = members(make_prompt_cache(model))
    if type_of(model) in ALONE or not all(hasattr(cache, "merge") for cache in caches):
        raise UnsupportedModelError(
            f"mlx-lm can't decode several prompts together with models of type {type_of(model)!r}: "
            "answer them one after the other"
        )


class CompressedBatchGenerator(BatchGenerator):
    """mlx-lm's `BatchGenerator`, with a policy that compresses every prompt before it joins the others.

    Prompts are read one at a time, whatever `prefill_batch_size` is, in the chunks and with the choices of
    `generate_step`; those below the gate stay full, in the same run. Requests whose caches hold about equally many
    entries decode together. A request's greedy answer is the one it gets alone. One that fails gets a last response
    with the finish reason "error" and the exception as `error`; the others go on.

    Args:
        model: an mlx-lm model.
        snapkv, policy: as of `generate_step`; without one of them, and without `turns`, this is mlx-lm's generator.
        kv_bits, kv_group_size: of compressed entries, if they are to be quantised; full ones stay plain.
        memory, verify, refresh, far: what becomes of the entries that are not kept, and what answers do with
            them, as of `generate_step`. Answers that go on reading all entries decode by themselves, in turn with
            the others.
        on_report: receives a request's number and its `CompressionReport`.
        on_recall: receives a request's number, caches with all entries of what it has read, for others to go on
            from, and those tokens; entries of `memory="drop"` are gone.
        reads_first: nobody waits for the first tokens: requests go on when no prompt is left to be read, which makes
            fewer and fuller steps.
        turns: caches that hold tokens already are compressed again, as those of a `Conversation` are, unless the
            policy reads a prompt again as a whole, such as kvzip.
        **kwargs: mlx-lm's, untouched: `max_tokens`, `stop_tokens`, `sampler`, `completion_batch_size` and so on.

    Raises:
        SnapKVError: for options or models that can't be served; also of the `insert` methods, before anything is read.
    """

    _old_wired_limit = None  # for mlx-lm's `close`, if nothing comes of the rest

    def __init__(
        self,
        model,
        *,
        snapkv: SnapKV | dict[str, Any] | str | bool | None = None,
        policy: Policy | Stages | str | None = None,
        kv_bits: int | None = None,
        kv_group_size: int = 64,
        memory: str = "drop",
        verify: str | None = None,
        refresh: str = "token",
        far: str | None = None,
        on_report: BatchReport | None = None,
        on_recall: Callable[[int, list, list[int]], None] | None = None,
        turns: bool = False,
        reads_first: bool = False,
        **kwargs: Any,
    ):
        chosen = resolve_policy(snapkv, policy)
        recall = Recall(memory, verify, refresh, far)
        recall.require(chosen)
        require_far(model, chosen, recall)
        if chosen is None and not turns:
            self._plan = None
            super().__init__(model, **kwargs)
            return
        require_no_conflict(kwargs)
        caches = make_caches(model, "drop" if chosen is None else memory, chosen)
        layers = attention_layers(model, caches)
        self._n_layers = layers[0].n_layers
        require_together(model)
        require_verifiable(recall, len(list(members(caches))), len(layers))
        quantization = None if kv_bits is None else Quantization(kv_bits, kv_group_size)
        if quantization is not None:
            require_quantizable(model, layers, quantization)
        ignored = lambda *args: None  # noqa: E731
        told = on_report or ignored, on_recall or ignored
        self._plan = Plan(model, chosen, quantization, recall, *told, turns=turns)
        super().__init__(model, **kwargs | {"prefill_batch_size": 1})
        self._limit = self.prefill_step_size
        self._prompt_batch = Reading.empty(model, self.sampler)
        self._generation_batch = Groups()
        self._reads_first = reads_first

    def insert_segments(
        self,
        segments: list[list[list[int]]],
        max_tokens: list[int] | None = None,
        caches: list[list[Any]] | None = None,
        all_tokens: list[list[int]] | None = None,
        samplers: Any = None,
        logits_processors: list[list[Callable]] | None = None,
        stop_sequences: list[Any] | None = None,
    ) -> list[int]:
        if self._plan is not None:
            given = caches or [[] for _ in segments]
            caches = [cache or make_prompt_cache(self.model) for cache in given]
            for parts, cache in zip(segments, caches):
                self._require(sum(map(len, parts)), cache)
            samplers = [None if s is None else guarded_sampler(s) for s in samplers or []]
            logits_processors = [
                [guarded_processor(p) for p in given or ()] for given in logits_processors or []
            ]
        return super().insert_segments(
            segments, max_tokens, caches, all_tokens, samplers, logits_processors, stop_sequences
        )

    def _require(self, n_prompt: int, prompt_cache: list) -> None:
        """Raises: SnapKVError: the policy can't serve such a prompt."""
        assert self._plan is not None
        if n_prompt and self._plan.reason_for_nothing(n_prompt, prompt_cache, 0) is None:
            assert self._plan.policy is not None
            n_tokens = held_tokens(self.model, prompt_cache) + n_prompt
            self._plan.policy.prefill_quotas(n_tokens, self._n_layers)

    def _next(self) -> Any:
        """mlx-lm's step; the time that compressions take in it counts as the prompts'."""
        if self._plan is None:
            return super()._next()
        groups = self._generation_batch
        has_room = len(groups) < self.completion_batch_size
        unread = len(self._prompt_batch) or (has_room and self._unprocessed_sequences)
        groups.waits = bool(self._reads_first and unread)
        found = super()._next()
        seconds, groups.compress_seconds = groups.compress_seconds, 0.0
        self._counters.decode_time -= seconds
        self._counters.prompt_time += seconds
        return found

    def _make_batch(self, n: int) -> Any:
        if self._plan is None:
            return super()._make_batch(n)
        uid, segments, max_tokens, cache, tokens, sampler, processors, stops = (
            self._unprocessed_sequences.popleft()
        )
        n_prompt = sum(map(len, segments))
        self._currently_processing.append([segments, 0, n_prompt])
        job = Job(self._plan, uid, n_prompt, cache, max_tokens)
        self.prefill_step_size = job.step_size(self._limit)
        return Reading.of(
            job,
            self.prefill_step_size,
            tokens=[tokens],
            samplers=[sampler],
            fallback_sampler=self.sampler,
            logits_processors=[processors],
            stop_sequences=[stops],
            max_tokens=[max_tokens],
        )
