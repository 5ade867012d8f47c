"""A request that is compressed: how its prompt is read, and how what it keeps is chosen."""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

from ..caches.block import BlockKVCache
from ..caches.contract import LayerCache
from ..caches.counting import AttentionCount
from ..caches.layers import (
    AttentionLayer,
    attention_layers,
    copies_but_entries,
)
from ..caches.recording import RecordingKVCache
from ..errors import SnapKVError
from ..models import attention_classes
from ..models.patch import recording
from ..planning.prompt_plan import ProgressCallback, fits_reason
from ..planning.request_plan import Plan
from ..policies.budgets import Quota
from .compress import Choice, Compression
from .loop_model import Call, HookedModel
from .pieces import Pieces
from .repetition import Repetition
from .report import CompressionReport


class Request(Compression, ABC):
    """One request that is compressed: it reads a prompt on `caches`, replaces them by what stays of it, and says how
    the answer is decoded from that.

    mlx-lm's own `generate_step` drives, on `model` and `caches`, and reads that list at every step: the compression
    replaces its entries between two of its steps.

    Args:
        plan: what is decided about it.
        prompt_cache: holds earlier turns, in full or compressed, or nothing.

    Attributes:
        caches: what mlx-lm is to be handed; once compressed, what the answer is decoded from.
        observes: queries are asked for.
        hook: makes the model's calls, if it is not the model itself.
        answers: an answer follows; where entries are only left for requests to come, there is none.
        repetition: reads the prompt again, if the policy asks for that.
        report: what the compression did; empty before.
    """

    hook: Call | None = None
    answers = True
    repetition: Repetition | None = None
    _started: float | None = None
    _prefill_seconds: float | None = None

    def __init__(self, model: Any, plan: Plan, prompt_cache: list):
        self._model, self.config, self.policy = model, plan.options, plan.policy
        self.model, self.prompt_cache = HookedModel(model, self), prompt_cache
        self._observed = attention_classes(model)
        report = CompressionReport(str(plan.policy), plan.n_prompt, pulled_to=plan.compacted_to)
        layers = attention_layers(model, prompt_cache)
        super().__init__(layers, list(prompt_cache), plan, report)
        self.observes = plan.observes
        self._pieces = Pieces(model, layers, plan.n_new, plan.n_prompt)
        if not plan.options.reads_in_blocks:  # whose chunks are blocks, before evictions
            self.hook = self._pieces
        self._prepare()

    @abstractmethod
    def _prepare(self) -> None:
        """Make `caches` ready to read, each with what it may hold meanwhile."""

    @property
    def read_caches(self) -> list:
        """The caches of what has been read so far, for other requests to go on from."""
        return self.caches

    @property
    def n_ahead(self) -> int:
        return self.plan.n_ahead

    def step_size(self, limit: int | None) -> int:
        return self.plan.chunk_size(limit)

    def progress(self, callback: ProgressCallback | None) -> ProgressCallback | None:
        """For mlx-lm's loop: `callback` counts tokens that are read again, too."""
        again = self.repetition
        return callback if callback is None or again is None else again.progress(callback)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Patch the model's attention classes for the block, if queries are asked for."""
        if self._started is None:
            self._require_unchanged()
            self._started = time.perf_counter()
        with recording(self._observed if self.observes else []):
            yield

    def _require_unchanged(self) -> None:
        n_held = self.plan.n_held
        if any(layer.entries_in(self.prompt_cache).offset != n_held for layer in self.layers):
            raise SnapKVError(
                "another request has filled this prompt cache: give each request its own"
            )

    def prompt_is_read(self) -> None:
        """Stop the prefill's clock, if it was started; the first call counts."""
        if self._prefill_seconds is None and self._started is not None:
            self._prefill_seconds = time.perf_counter() - self._started

    def compress(self) -> CompressionReport:
        """Compress `caches`, once, and let the answer begin; what was done.

        Raises: SnapKVError: the scores are NaN, or there is no room for the entries that stay.
        """
        if not self.is_compressed:
            self.prompt_is_read()
            super().compress()
            n_again = self.repetition.seconds if self.repetition else 0.0
            self.report.prefill_seconds = (self._prefill_seconds or 0.0) - n_again
            self.report.selection_seconds += n_again
        return self.report

    def begin_answer(self) -> None:
        self.hook = None
        self.observes = self.plan.decode_policy.observes_answer

    def end(self) -> None:
        """The answer has ended: leave the caller's caches ready to go on from."""


class InMemoryReader(Request):
    """Reads on caches of its own, all at once or in blocks between evictions; what is dropped is gone.

    The caller's list and caches stay as they are until it compresses: if anything raises before, nothing has changed.
    They may hold earlier turns: then the new tokens' queries vote over the entries held and their own.
    """

    def _prepare(self) -> None:
        plan, quotas = self.plan, self.plan.prefill_quotas
        if plan.options.reads_again:
            self.repetition = Repetition(self._pieces, self.layers, plan.decode_policy, plan.n_new)
            self.hook = self.repetition.read
        self.caches = copies_but_entries(self.prompt_cache, self.layers)
        held = {layer.entries_in(self.prompt_cache).n_entries for layer in self.layers}
        uniform = len(set(quotas)) == len(held) == 1
        for layer, quota in zip(self.layers, quotas):
            layer.put(self.caches, self._cache(layer, quota, uniform))

    def _cache(self, layer: AttentionLayer, quota: Quota, uniform: bool) -> LayerCache:
        """A cache that records; one that evicts if entries are evicted, counted, or held from an earlier turn."""
        plan, policy = self.plan, self.plan.prefill_policy
        n_answer = plan.n_prompt + plan.n_ahead
        expected = n_answer + 1 - plan.n_held
        if self.repetition is not None:
            expected += self.repetition.most_at_once
        accumulates, once = plan.options.accumulates_attention, not plan.options.reads_in_blocks
        if once and not accumulates and not plan.n_held:
            cache = RecordingKVCache(plan.first, plan.last, expected, layer)
            cache.statistics_from = plan.statistics_from
            return cache
        before = layer.cache_in(self.prompt_cache)
        entries = layer.entries_in(self.prompt_cache).held() if plan.n_held else None
        if entries is not None:
            expected += len(entries)
            quota = Quota(expected, quota.n_sink, quota.n_window) if once else quota
        plain = entries is None or entries.quantization is None
        block = BlockKVCache(
            policy,
            quota,
            policy.block,
            layer=layer,
            last=plan.last,
            newest=max(policy.obs_window, plan.n_voters),
            expected=expected,
            uniform=uniform,
            # What is plain is quantised when it has been chosen, and never twice.
            quantization=None if once and plain else plan.options.quantization,
            counting=AttentionCount() if accumulates else None,
        )
        block.steady = range(plan.n_prompt, n_answer)
        block.statistics_from = plan.statistics_from
        if plan.compaction is not None:
            block.compaction = plan.compaction.after(getattr(before, "compaction", None))
        if entries is not None:
            block.offset = plan.n_held
            block.hold(entries)
            block.inherit(before)
        return block

    def choose(self) -> list[Choice]:
        self._require_unchanged()
        return super().choose()

    def keep(self, choices: list[Choice]) -> None:
        super().keep(choices)
        self.prompt_cache[:] = self.caches

    def begin_answer(self) -> None:
        super().begin_answer()
        n_prompt = self.plan.n_prompt
        if self.plan.decode_policy.schedule == "block" and self.report.entries >= n_prompt:
            why = fits_reason(n_prompt, self.policy)
            self.report.reason = f"{why}; the answer is kept within it"
