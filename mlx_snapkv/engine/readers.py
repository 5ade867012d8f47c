"""How a prompt is read, and how what it keeps is chosen: on caches of its own, or on caches that retain everything."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..caches.block import BlockKVCache
from ..caches.contract import LayerCache
from ..caches.full_view import FullView
from ..caches.layers import (
    AttentionLayer,
    attention_layers,
    copies_but_entries,
    quotas_of,
    require_quantizable,
)
from ..caches.recording import RecordingKVCache
from ..caches.refreshed import RefreshedKVCache
from ..entries.quantization import Quantization
from ..errors import SnapKVError, UnsupportedModelError
from ..models import type_of
from ..policies import Policy, Stages
from ..policies.budgets import Quota
from .compress import Choice, Compression
from .loop_model import Call
from .prompt_plan import chunk_size, fits_reason, plan_prompt
from .repetition import Repetition
from .report import CompressionReport, Verified
from .retention import RetentionConfig
from .self_speculation import SelfSpeculation


class Reader(Compression, ABC):
    """Reads a prompt on `caches`, replaces them by what stays of it, and says how the answer is decoded from that.

    Args:
        n_new: tokens to read, after what is in `prompt_cache`: earlier turns, in full or compressed, or nothing.
        quantization: of the entries kept.

    Attributes:
        caches: what mlx-lm is to be handed; once compressed, what the answer is decoded from.
        observes: queries are asked for.
        hook: makes the model's calls, if it is not the model itself.
        on_read: compresses; for a reader that has to when the last token has been read.
        repetition: reads the prompt again, if the policy asks for that.

    Raises:
        SnapKVError: the model is not supported, its entries can't be quantised so, or a budget has no room for what is
            always kept.
    """

    hook: Call | None = None
    on_read: Callable[[], object]
    repetition: Repetition | None = None

    def __init__(
        self,
        model: Any,
        policy: Policy | Stages,
        n_new: int,
        prompt_cache: list,
        retention: RetentionConfig,
        quantization: Quantization | None,
    ):
        self.model, self.policy, self.n_new = model, policy, n_new
        self.prompt_cache, self.retention = prompt_cache, retention
        self.prefill_policy, decode_policy = policy.stages
        layers = attention_layers(model, prompt_cache)
        self.n_held = layers[0].entries_in(prompt_cache).offset
        n_prompt = self.n_held + n_new
        plan = plan_prompt(policy, n_prompt, retention.retains and policy.reads_in_blocks)
        report = CompressionReport(str(policy), n_prompt)
        super().__init__(layers, list(prompt_cache), decode_policy, plan, report, quantization)
        self.compaction = found = retention.compaction(model, policy, n_prompt)
        report.pulled_to = found.length if found is not None and n_prompt > found.length else None
        self.observes = any(stage.observes for stage in policy.stages)
        wanted = [stage.query_statistics for stage in policy.stages]
        self.statistics_from = min((n for n in wanted if n is not None), default=None)
        if quantization is not None:
            require_quantizable(model, layers, quantization)
        if self.statistics_from is not None and any(layer.cap for layer in layers):
            raise UnsupportedModelError(
                f"{policy} has no closed form where logits are capped, as those of model type "
                f"{type_of(model)!r} are: give another policy, such as snapkv"
            )
        retention.require_rollback(prompt_cache, len(layers))
        self._prepare(quotas_of(layers, policy.prefill_quotas, n_prompt))

    @abstractmethod
    def _prepare(self, quotas: list[Quota]) -> None:
        """Make `caches` ready to read, each with what it may hold meanwhile."""

    @property
    def refreshes(self) -> bool:
        """Whether the answer's tokens choose anew: not among entries that are quantised for the answer, or that the
        model's attention itself reads from its cache."""
        if self.retention.verify is not None:
            return True
        reads_itself = any(layer.family.method != "__call__" for layer in self.layers)
        return self.retention.reads_on and self.quantization is None and not reads_itself

    def require_unchanged(self) -> None:
        if any(layer.entries_in(self.prompt_cache).offset != self.n_held for layer in self.layers):
            raise SnapKVError(
                "another request has filled this prompt cache meanwhile: give each its own"
            )

    def step_size(self, limit: int | None) -> int:
        return chunk_size(self.policy, limit, self.plan, self.n_new)

    def begin_answer(self) -> None:
        self.hook = None
        self.observes = self.refreshes or self.decode_policy.observes_answer

    def end(self) -> None:
        """The answer has ended: leave the caller's caches ready to go on from."""


class InMemoryReader(Reader):
    """Reads on caches of its own, all at once or in blocks between evictions; what is dropped is gone.

    The caller's list and caches stay as they are until it compresses: if anything raises before, nothing has changed.
    They may hold earlier turns: then the new tokens' queries vote over the entries held and their own.
    """

    def _prepare(self, quotas: list[Quota]) -> None:
        if self.decode_policy.repeats is not None:
            self.repetition = Repetition(self.model, self.layers, self.decode_policy, self.n_new)
            self.hook = self.repetition.read
        self.caches = copies_but_entries(self.prompt_cache, self.layers)
        held = {layer.entries_in(self.prompt_cache).n_entries for layer in self.layers}
        uniform = len(set(quotas)) == len(held) == 1
        for layer, quota in zip(self.layers, quotas):
            layer.put(self.caches, self._cache(layer, quota, uniform))

    def _cache(self, layer: AttentionLayer, quota: Quota, uniform: bool) -> LayerCache:
        """A cache that records; one that evicts if entries are evicted, counted, or held from an earlier turn."""
        plan, policy = self.plan, self.prefill_policy
        n_answer = plan.n_prompt + plan.n_ahead
        expected = n_answer + 1 - self.n_held
        if self.repetition is not None:
            expected += self.repetition.most_at_once
        accumulates = any(stage.accumulates_attention for stage in self.policy.stages)
        once = not self.policy.reads_in_blocks
        if once and not accumulates and not self.n_held:
            cache = RecordingKVCache(plan.first, plan.last, expected, layer)
            cache.statistics_from = self.statistics_from
            return cache
        before = layer.cache_in(self.prompt_cache)
        entries = layer.entries_in(self.prompt_cache).held() if self.n_held else None
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
            quantization=None if once and plain else self.quantization,
            accumulates=accumulates,
            steady=range(plan.n_prompt, n_answer),
        )
        block.statistics_from = self.statistics_from
        if self.compaction is not None:
            block.compaction = self.compaction.after(getattr(before, "compaction", None))
        if entries is not None:
            block.offset = self.n_held
            block.hold(entries)
            block.inherit(before)
        return block

    def choose(self) -> list[Choice]:
        self.require_unchanged()
        return super().choose()

    def keep(self, choices: list[Choice]) -> None:
        super().keep(choices)
        self.prompt_cache[:] = self.caches

    def begin_answer(self) -> None:
        super().begin_answer()
        n_prompt = self.plan.n_prompt
        if self.decode_policy.schedule == "block" and self.report.entries >= n_prompt:
            why = fits_reason(n_prompt, self.policy)
            self.report.reason = f"{why}; the answer is kept within it"


class RetainingReader(Reader):
    """Reads on the caller's own caches, which go on holding all entries; compressed copies serve the answer only."""

    def _prepare(self, quotas: list[Quota]) -> None:
        capacity = self.plan.n_prompt + self.plan.n_ahead + 1
        for layer in self.layers:
            cache = layer.cache_in(self.caches)
            cache.observe(self.plan.first, self.plan.last, capacity, self.statistics_from)
            cache.layer = layer

    @property
    def votes(self) -> bool:
        """Whether the prompt chooses: not where the answer's tokens do, unless it shares a budget out by layer."""
        return not self.refreshes or self.decode_policy.adaptive

    def choose(self) -> list[Choice]:
        return super().choose() if self.votes else []

    def keep(self, choices: list[Choice]) -> None:
        small = copies_but_entries(self.caches, self.layers)
        self._replace(small, choices)
        self.caches[:] = small
        self.offload()

    def offload(self) -> None:
        """Put the prompt's entries to where they are kept; SnapKVError if there is no room, and some stay in memory."""
        for layer in self.layers:
            layer.cache_in(self.prompt_cache).offload()

    def full_view(self, layer: AttentionLayer) -> FullView:
        """All of a layer's entries, with an index for queries like the prompt's last, if those were recorded."""
        cache = layer.cache_in(self.prompt_cache)
        view = FullView(cache.views(), layer, self.compaction, cache.index)
        if cache.index is None:
            view.index = view.make_index(cache.held(1).voters.heads if cache.n_queries else None)
        return view

    def begin_answer(self) -> None:
        """Unless the prompt has chosen for it, let every token of the answer choose anew among all entries."""
        super().begin_answer()
        if not self.refreshes:
            return
        kept, counts = self.report.entries_kept, []
        for layer, quota in zip(self.layers, self.decode_quotas):
            if self.decode_policy.adaptive:
                quota = replace(quota, entries=layer.entries_in(self.caches).n_entries)
            layer.put(self.caches, self.refreshed(layer, quota))
            counts.append(layer.entries_in(self.caches).n_entries)
            kept[layer.index] = kept[layer.index] or counts[-1]
        self.report.refreshed = max(counts)
        if self.retention.verify is not None:
            self.report.verified = Verified()
            caches = self.full_caches(), list(self.caches)
            self.hook = SelfSpeculation(self.model, *caches, self.report.verified)

    def end(self) -> None:
        if isinstance(self.hook, SelfSpeculation):
            self.hook.close()

    def refreshed(self, layer: AttentionLayer, quota: Quota) -> RefreshedKVCache:
        """A cache whose tokens choose `quota` entries anew among all."""
        return RefreshedKVCache(self.full_view(layer), quota, layer)

    def full_caches(self) -> list:
        full = list(self.prompt_cache)
        for layer in self.layers:
            layer.put(full, layer.cache_in(full).growing_cache())
        return full
