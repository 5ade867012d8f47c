"""One request from its first chunk to its compression.

mlx-lm's own `generate_step` drives: it is handed a list of recording caches, and reads that list at every
step, so the compression is a replacement of the list's entries between two of its steps.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..caches.block import BlockKVCache
from ..caches.compaction import Compaction
from ..caches.contract import LayerCache
from ..caches.layers import AttentionLayer, attention_layers, copies_but_entries, quotas_of
from ..caches.quantizable import require_quantizable
from ..caches.recording import RecordingKVCache
from ..entries.quantization import Quantization
from ..errors import SnapKVError, UnsupportedModelError
from ..models import attention_classes, type_of
from ..models.patch import recording
from ..policies import Policy, Stages
from ..policies.budgets import Quota
from .compress import Compression, KeptCallback
from .decision import Decision, ProgressCallback, chunk_size, decide, fits_reason
from .repeating import Repetition
from .report import CompressionReport
from .wrapper import Answered


@dataclass
class Request:
    """One request from its first chunk to its compression.

    The caller's list is not touched before that, and neither are its caches: if anything raises on the way, they are as
    they were. They may hold earlier turns, in full or compressed: then the queries of the new tokens vote over the
    entries held and their own. What was dropped before is gone.

    Attributes:
        model: an mlx-lm model.
        policy: what to keep.
        n_new: tokens to read.
        prompt_cache: the caller's cache list.
        quantization: how the entries kept are to be quantised, if at all.
        pull: how far apart queries and keys may be; None is as far as they are.
        on_kept: told what is kept of every layer.
        caches: the list to hand to mlx-lm.
        loop_model: the model to hand to it.
        decision: who votes, and where the compression falls.
        compress_seconds: what the compression itself took.

    Raises:
        SnapKVError: the model is not supported, its entries can't be quantised so, or the budget has no room for
            what is always kept.
    """

    model: Any
    policy: Policy | Stages
    n_new: int
    prompt_cache: list
    quantization: Quantization | None = None
    pull: Compaction | None = None

    def __post_init__(self):
        self.loop_model = self.model
        self.on_kept: KeptCallback | None = None
        self.prefill_policy, self.decode_policy = self.policy.stages
        self._layers = attention_layers(self.model, self.prompt_cache)
        self._held = self._layers[0].entries_in(self.prompt_cache).offset
        self.decision = self._decided()
        self._observed = attention_classes(self.model)
        if self.quantization is not None:
            require_quantizable(self.model, self._layers, self.quantization)
        self._require_own_logits()
        self._repetition: Repetition | None = None
        if self.decode_policy.repeats is not None:
            self._repetition = Repetition(self.model, self._layers, self.decode_policy, self.n_new)
            self.loop_model = Answered(self.model)
            self.loop_model.answering = self._repetition.read
        self.caches = self._prefill_caches()
        self.compress_seconds = 0.0
        self._started: float | None = None
        self._prefill_seconds: float | None = None

    def _require_own_logits(self) -> None:
        """Raises: UnsupportedModelError: a policy expects logits of its queries' statistics, and they are capped."""
        if self._statistics_from is not None and any(layer.cap for layer in self._layers):
            raise UnsupportedModelError(
                f"{self.policy} has no closed form where logits are capped, as those of model type "
                f"{type_of(self.model)!r} are: give another policy, such as snapkv"
            )

    def _decided(self) -> Decision:
        return decide(self.policy, self._held + self.n_new, self.n_new)

    @property
    def compresses_before_last_token(self) -> bool:
        """Whether it is compressed before mlx-lm feeds the prompt's last token; else when it has."""
        return self.decision.at < self.decision.n_prompt

    @property
    def _observes(self) -> bool:
        return any(stage.observes for stage in self.policy.stages)

    @property
    def _observes_answer(self) -> bool:
        return self.decode_policy.observes_answer

    @property
    def _statistics_from(self) -> int | None:
        wanted = [stage.query_statistics for stage in self.policy.stages]
        return min((n for n in wanted if n is not None), default=None)

    def _prefill_caches(self) -> list:
        """Caches to read the prompt with."""
        caches = copies_but_entries(self.prompt_cache, self._layers)
        quotas = quotas_of(self._layers, self.policy.prefill_quotas, self.decision.n_prompt)
        held = {layer.entries_in(self.prompt_cache).n_entries for layer in self._layers}
        uniform = len(set(quotas)) == len(held) == 1
        for layer, quota in zip(self._layers, quotas):
            layer.put(caches, self._prefill_cache(layer, quota, uniform))
        return caches

    def _prefill_cache(self, layer: AttentionLayer, quota: Quota, uniform: bool) -> LayerCache:
        """A cache that records; one that evicts if entries give way, are counted, or go on from an earlier turn."""
        held, decision = layer.entries_in(self.prompt_cache), self.decision
        expected = decision.at + decision.n_ahead + 1 - self._held
        if self._repetition is not None:
            expected += self._repetition.most_at_once
        accumulates = any(stage.accumulates_attention for stage in self.policy.stages)
        once = not self._evicts
        if once and not accumulates and not self._held:
            cache = RecordingKVCache(decision.first, decision.last, expected, layer)
            cache.statistics_from = self._statistics_from
            return cache
        entries = held.held() if self._held else None
        if entries is not None:
            expected += len(entries)
            quota = Quota(expected, quota.n_sink, quota.n_window) if once else quota
        plain = entries is None or entries.quantization is None
        block = BlockKVCache(
            self.prefill_policy,
            quota,
            self.prefill_policy.block,
            layer=layer,
            last=decision.last,
            newest=max(self.prefill_policy.obs_window, decision.n_voters),
            expected=expected,
            uniform=uniform,
            # What is plain is quantised when it has been chosen, and never twice.
            quantization=None if once and plain else self.quantization,
            accumulates=accumulates,
            steady=range(decision.at, decision.at + decision.n_ahead),
        )
        block.statistics_from = self._statistics_from
        if self.pull is not None:
            before = getattr(layer.cache_in(self.prompt_cache), "compaction", None)
            block.compaction = self.pull.after(before)
        if entries is not None:
            block.offset = self._held
            block.hold(entries)
            block.inherit(layer.cache_in(self.prompt_cache))
        return block

    @property
    def _evicts(self) -> bool:
        """Whether entries are evicted while the prompt is read."""
        return self.policy.reads_in_blocks

    def step_size(self, limit: int | None) -> int:
        """Tokens to read at a time: a block where entries are evicted, else as `chunk_size` has it."""
        if self._evicts:
            return min(limit or self.prefill_policy.block, self.prefill_policy.block)
        n_before = self.decision.first - self._held if self._observes else self.n_new
        return chunk_size(self.prefill_policy, limit, self.n_new, n_before)

    def progress(self, callback: ProgressCallback | None) -> ProgressCallback | None:
        """What mlx-lm's loop is to call as tokens are read, so that `callback` is told of those read again, too."""
        if callback is None or self._repetition is None:
            return callback
        return self._repetition.progress(callback)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Patch the model's attention classes for the block: for all chunks up to the last voter, or for some."""
        if self._started is None:
            self._require_unchanged()
            self._started = time.perf_counter()
        with recording(self._observed if self._observes else []):
            yield

    @contextlib.contextmanager
    def recording_answer(self) -> Iterator[None]:
        """The same for the tokens after it is compressed, whose queries vote only if entries still give way by them."""
        with recording(self._observed if self._observes_answer else []):
            yield

    @contextlib.contextmanager
    def decoding(self) -> Iterator[None]:
        """The same for all tokens of the answer; when the block is left, it has ended."""
        try:
            with self.recording_answer():
                yield
        finally:
            self.end()

    def end(self) -> None:
        """The answer has ended: leave the caller's caches as whoever goes on from them wants them."""

    def prompt_is_read(self) -> None:
        """Stop the prefill's clock, if it was started; the first call counts."""
        if self._prefill_seconds is None and self._started is not None:
            self._prefill_seconds = time.perf_counter() - self._started

    def compress(self) -> CompressionReport:
        """Compress the caches and hand them to the caller's list."""
        self.prompt_is_read()
        started = time.perf_counter()
        report = self._replace()
        self.compress_seconds = time.perf_counter() - started
        return report

    def _replace(self) -> CompressionReport:
        self._require_unchanged()
        report = self._compressed(self.caches)
        self.prompt_cache[:] = self.caches
        return report

    def _compressed(self, caches: list) -> CompressionReport:
        decision, policy = self.decision, self.decode_policy
        report = Compression(
            self._layers,
            caches,
            policy,
            at=decision.at,
            n_tokens=decision.n_prompt,
            n_voters=decision.n_voters if policy.obs_window else 0,
            quantization=self.quantization,
            on_kept=self.on_kept,
        ).run()
        report.policy, report.pulled_to = str(self.policy), self.pulled_to
        report.prefill_seconds = self._prefill_seconds or 0.0
        if self._repetition is not None:
            report.prefill_seconds -= self._repetition.seconds
            report.selection_seconds += self._repetition.seconds
        if policy.schedule == "block" and report.entries >= decision.at:
            report.reason = fits_reason(decision.at, self.policy) + "; the answer is kept within it"
        return report

    @property
    def pulled_to(self) -> int | None:
        """The length that the model was trained to, if the prompt is longer and its entries are pulled together."""
        beyond = self.pull is not None and self.decision.n_prompt > self.pull.length
        return self.pull.length if self.pull is not None and beyond else None

    def _require_unchanged(self) -> None:
        if any(layer.entries_in(self.prompt_cache).offset != self._held for layer in self._layers):
            raise SnapKVError(
                "another request has filled this prompt cache meanwhile: give each its own"
            )


def held_tokens(model, prompt_cache: list) -> int:
    """Tokens that a prompt cache has read."""
    return attention_layers(model, prompt_cache)[0].entries_in(prompt_cache).offset
