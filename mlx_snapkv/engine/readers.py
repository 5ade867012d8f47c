"""How a prompt is read, and how what it keeps is chosen: on caches of its own, or on caches that retain everything."""

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..caches.block import BlockKVCache
from ..caches.compaction import Compaction
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
from .choosing import Choice
from .compress import Compression, KeptCallback
from .loop_model import Call
from .prompt_plan import PromptPlan, chunk_size, plan_prompt
from .repetition import Repetition
from .retention import DROP, RetentionConfig


@dataclass
class Prompt:
    """What is to be read and compressed.

    Attributes:
        model: an mlx-lm model.
        policy: what to keep.
        n_new: tokens to read.
        prompt_cache: what they are read after: earlier turns, in full or compressed, or nothing.
        retention: what becomes of the entries that are not kept.
        quantization: how the entries kept are quantised, if at all.

    Raises:
        SnapKVError: the model is not supported, or its entries can't be quantised so.
    """

    model: Any
    policy: Policy | Stages
    n_new: int
    prompt_cache: list
    retention: RetentionConfig = DROP
    quantization: Quantization | None = None

    def __post_init__(self):
        self.prefill_policy, self.decode_policy = self.policy.stages
        self.layers = attention_layers(self.model, self.prompt_cache)
        self.n_held = self.layers[0].entries_in(self.prompt_cache).offset
        n_prompt = self.n_held + self.n_new
        self.out_of_core = self.retention.retains and self.policy.reads_in_blocks
        self.plan: PromptPlan = plan_prompt(self.policy, n_prompt, self.out_of_core)
        self.compaction: Compaction | None = self.retention.compaction(
            self.model, self.policy, n_prompt
        )
        wanted = [stage.query_statistics for stage in self.policy.stages]
        self.statistics_from = min((n for n in wanted if n is not None), default=None)
        if self.quantization is not None:
            require_quantizable(self.model, self.layers, self.quantization)
        if self.statistics_from is not None and any(layer.cap for layer in self.layers):
            raise UnsupportedModelError(
                f"{self.policy} has no closed form where logits are capped, as those of model type "
                f"{type_of(self.model)!r} are: give another policy, such as snapkv"
            )

    @property
    def refreshes(self) -> bool:
        """Whether the answer's tokens choose anew.

        They can't from entries that are to be quantised for the answer, or that the model's attention itself reads from
        its cache.
        """
        if self.retention.verify is not None:
            return True
        reads_itself = any(layer.family.method != "__call__" for layer in self.layers)
        return self.retention.reads_on and self.quantization is None and not reads_itself

    @property
    def pulled_to(self) -> int | None:
        """The length that the model was trained on, if the prompt is longer and positions are compacted."""
        found = self.compaction
        return found.length if found is not None and self.plan.n_prompt > found.length else None

    def require_unchanged(self) -> None:
        """Raises: SnapKVError: the prompt cache has been fed meanwhile."""
        if any(layer.entries_in(self.prompt_cache).offset != self.n_held for layer in self.layers):
            raise SnapKVError(
                "another request has filled this prompt cache meanwhile: give each its own"
            )


class Reader:
    """Reads a prompt on `caches`, and chooses what stays of it: a `Compressor`.

    Attributes:
        caches: what mlx-lm is to be handed; once compressed, what the answer is decoded from.
        observes: queries are asked for while it reads.
        hook: makes the model's calls while it reads, if it is not the model itself.
        on_kept: called with what is kept of each layer.
    """

    caches: list
    hook: Call | None = None
    on_kept: KeptCallback | None = None

    def __init__(self, prompt: Prompt):
        self.prompt, self.layers, self.plan = prompt, prompt.layers, prompt.plan
        self.observes = any(stage.observes for stage in prompt.policy.stages)

    def step_size(self, limit: int | None) -> int:
        """Tokens to read at a time: a block where entries are evicted, else as `chunk_size` has it."""
        policy, n_new = self.prompt.prefill_policy, self.prompt.n_new
        if self.prompt.policy.reads_in_blocks:
            return min(limit or policy.block, policy.block)
        n_before = self.plan.first - self.prompt.n_held if self.observes else n_new
        return chunk_size(policy, limit, n_new, n_before)

    def _quotas(self) -> list[Quota]:
        """What each layer may hold while the prompt is read."""
        return quotas_of(self.layers, self.prompt.policy.prefill_quotas, self.plan.n_prompt)

    def _compression(self, caches: list) -> Compression:
        prompt = self.prompt
        how = {"quantization": prompt.quantization, "on_kept": self.on_kept}
        return Compression(self.layers, caches, prompt.decode_policy, self.plan, **how)  # type: ignore[arg-type]

    def choose(self) -> list[Choice]:
        return self._compression(self.caches).choose()

    def keep(self, choices: list[Choice]) -> None:
        raise NotImplementedError

    def end(self) -> None:
        """The answer has ended."""


class InMemoryReader(Reader):
    """Reads on caches of its own, all at once or in blocks between evictions; what is dropped is gone.

    The caller's list and caches stay as they are until it compresses: if anything raises before, nothing has changed.
    They may hold earlier turns: then the new tokens' queries vote over the entries held and their own.
    """

    def __init__(self, prompt: Prompt):
        super().__init__(prompt)
        self.repetition: Repetition | None = None
        if prompt.decode_policy.repeats is not None:
            self.repetition = Repetition(
                prompt.model, self.layers, prompt.decode_policy, prompt.n_new
            )
            self.hook = self.repetition.read
        self.caches = copies_but_entries(prompt.prompt_cache, self.layers)
        quotas = self._quotas()
        held = {layer.entries_in(prompt.prompt_cache).n_entries for layer in self.layers}
        uniform = len(set(quotas)) == len(held) == 1
        for layer, quota in zip(self.layers, quotas):
            layer.put(self.caches, self._cache(layer, quota, uniform))

    def _cache(self, layer: AttentionLayer, quota: Quota, uniform: bool) -> LayerCache:
        """A cache that records; one that evicts if entries are evicted, counted, or held from an earlier turn."""
        prompt, plan = self.prompt, self.plan
        expected = plan.n_prompt + plan.n_ahead + 1 - prompt.n_held
        if self.repetition is not None:
            expected += self.repetition.most_at_once
        accumulates = any(stage.accumulates_attention for stage in prompt.policy.stages)
        once = not prompt.policy.reads_in_blocks
        if once and not accumulates and not prompt.n_held:
            cache = RecordingKVCache(plan.first, plan.last, expected, layer)
            cache.statistics_from = prompt.statistics_from
            return cache
        before = layer.cache_in(prompt.prompt_cache)
        entries = layer.entries_in(prompt.prompt_cache).held() if prompt.n_held else None
        if entries is not None:
            expected += len(entries)
            quota = Quota(expected, quota.n_sink, quota.n_window) if once else quota
        plain = entries is None or entries.quantization is None
        block = BlockKVCache(
            prompt.prefill_policy,
            quota,
            prompt.prefill_policy.block,
            layer=layer,
            last=plan.last,
            newest=max(prompt.prefill_policy.obs_window, plan.n_voters),
            expected=expected,
            uniform=uniform,
            # What is plain is quantised when it has been chosen, and never twice.
            quantization=None if once and plain else prompt.quantization,
            accumulates=accumulates,
            steady=range(plan.n_prompt, plan.n_prompt + plan.n_ahead),
        )
        block.statistics_from = prompt.statistics_from
        if prompt.compaction is not None:
            block.compaction = prompt.compaction.after(getattr(before, "compaction", None))
        if entries is not None:
            block.offset = prompt.n_held
            block.hold(entries)
            block.inherit(before)
        return block

    def choose(self) -> list[Choice]:
        self.prompt.require_unchanged()
        return super().choose()

    def keep(self, choices: list[Choice]) -> None:
        """Compress the caches and hand them to the caller's list."""
        self._compression(self.caches).keep(choices)
        self.prompt.prompt_cache[:] = self.caches


class RetainingReader(Reader):
    """Reads on the caller's own caches, which go on holding all entries; compressed copies serve the answer only."""

    def __init__(self, prompt: Prompt):
        super().__init__(prompt)
        self.caches = list(prompt.prompt_cache)
        self._prepare()

    def _prepare(self) -> None:
        """Have the caches record."""
        plan = self.plan
        self._quotas()  # raises where a budget has no room
        for layer in self.layers:
            cache = layer.cache_in(self.caches)
            capacity = plan.n_prompt + plan.n_ahead + 1
            cache.observe(plan.first, plan.last, capacity, self.prompt.statistics_from)
            cache.layer = layer

    def keep(self, choices: list[Choice]) -> None:
        small = copies_but_entries(self.caches, self.layers)
        self._compression(small).keep(choices)
        self.caches[:] = small

    def offload(self) -> None:
        """Put the prompt's entries to where they are kept.

        Raises:
            SnapKVError: there is no room for them there; some then stay in memory.
        """
        for layer in self.layers:
            layer.cache_in(self.prompt.prompt_cache).offload()

    def full_view(self, layer: AttentionLayer) -> FullView:
        """All of a layer's entries."""
        cache = layer.cache_in(self.prompt.prompt_cache)
        return FullView(cache.views(), layer, self.prompt.compaction, cache.index)

    def last_queries(self, layer: AttentionLayer) -> mx.array | None:
        """The prompt's last queries, each KV head's readers together, if they were recorded."""
        cache = layer.cache_in(self.prompt.prompt_cache)
        return cache.held(1).voters.heads if cache.n_queries else None

    def refreshed(self, layer: AttentionLayer, quota: Quota) -> RefreshedKVCache:
        """A cache whose tokens choose `quota` entries anew among all."""
        everything = self.full_view(layer)
        everything.index = everything.make_index(self.last_queries(layer))
        return RefreshedKVCache(everything, quota, layer)

    def full_caches(self) -> list:
        """Caches with all entries to read on with."""
        full = list(self.prompt.prompt_cache)
        for layer in self.layers:
            layer.put(full, layer.cache_in(full).growing_cache())
        return full
