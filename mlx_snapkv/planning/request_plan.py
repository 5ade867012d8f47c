"""The plan of one request: everything that is decided about it before it runs, in one frozen value.

Whoever reads, compresses, decodes, counts memory or tells a user what will happen asks this plan, and decides nothing.
"""

from dataclasses import dataclass, replace
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import (
    AttentionLayer,
    attention_layers,
    held_tokens,
    is_compressed,
    require_quantizable,
)
from ..caches.matching import n_tokens
from ..caches.stored_caches import in_files
from ..errors import UnsupportedModelError
from ..models import type_of
from ..policies.budgets import Quota
from ..policies.sparse import CHEAP, LAST, Reach, Sparse
from .config import CompressionConfig
from .exclusions import When, require_compatible
from .products import entries_for
from .prompt_plan import PREFILL_STEP_SIZE, PromptPlan, chunk_size, fits_reason, gate, plan_prompt

NO_POLICY_REASON = "no policy was given: pass snapkv or policy to compress"
FULL_CACHE_REASON = "the full cache was asked for"
EMBEDDINGS_REASON = "a prompt given as embeddings is not compressed"


@dataclass(frozen=True)
class SparseReading:
    """How the chunks of a prompt choose what they read of the entries before them.

    Attributes:
        reach: what a chunk reads; one that may read as many entries as there are reads all of them.
        last: what the prompt's last tokens read, those from position `last_from` on.
        n_before: tokens before the first chunk that chooses: all, if none does.
    """

    reach: Reach
    last: Reach
    last_from: int
    n_before: int


@dataclass(frozen=True, kw_only=True)
class Plan(PromptPlan):
    """What is decided about one request.

    Attributes:
        options: what was asked for: the policy or sparse attention and where entries lie.
        reason: why the prompt is left to mlx-lm as it is, as its report says; None if it is not. What follows is then
            empty.
        n_new: tokens to read, after those of earlier turns.
        prefill_quota: what each full-attention layer holds while the prompt is read.
        decode_quota: what the answer is decoded from, or reads, in each full-attention layer.
        sparse_reading: how chunks of the prompt choose what they read, if they do.
    """

    options: CompressionConfig
    reason: str | None = None
    n_new: int = 0
    prefill_quota: Quota = None  # type: ignore[assignment]  # a value unless there is a reason
    decode_quota: Quota = None  # type: ignore[assignment]
    sparse_reading: SparseReading | None = None

    @property
    def policy(self) -> Any:
        """A policy, two of them, or sparse attention; None reads and keeps everything."""
        return self.options.policy

    @property
    def prefill_policy(self) -> Any:
        return self.policy.stages[0]

    @property
    def decode_policy(self) -> Any:
        return self.policy.stages[1]

    @property
    def n_held(self) -> int:
        """Tokens of earlier turns."""
        return self.n_prompt - self.n_new

    @property
    def observes(self) -> bool:
        """Whether queries of the prompt are asked for: to vote, or by chunks that choose what they read."""
        return self.sparse_reading is not None or any(x.observes for x in self.policy.stages)

    @property
    def observes_answer(self) -> bool:
        """Whether queries of the answer are asked for: to vote at evictions, or to choose what each token reads."""
        return self.options.is_sparse or self.decode_policy.observes_answer

    @property
    def statistics_from(self) -> int | None:
        """The first position whose queries count in the statistics that a policy asks for, if one does."""
        wanted = [stage.query_statistics for stage in self.policy.stages]
        return min((n for n in wanted if n is not None), default=None)

    @property
    def capacity(self) -> int:
        """Entries to allocate at once where all stay, those held among them.

        Those that chunks choose from go to their store with every chunk, the ones before the first such chunk with it.
        """
        whole, reading = self.n_prompt + self.n_ahead + 1, self.sparse_reading
        if reading is None or self.options.store == "memory":
            return whole
        return whole if reading.n_before == self.n_prompt else reading.n_before

    def chunk_size(self, limit: int | None) -> int:
        """Return the number of tokens to read at a time, `limit` at most."""
        if self.reason is not None:
            return limit or PREFILL_STEP_SIZE
        return chunk_size(self.policy, limit, self, self.n_new)


def plan_request(
    model: Any,
    options: CompressionConfig,
    n_new: int,
    prompt_cache: list | None = None,
    *,
    max_tokens: int = 0,
    is_embedded: bool = False,
    layers: list[AttentionLayer] | None = None,
) -> Plan:
    """What a request to read `n_new` tokens on a prompt cache will do; nothing is read or changed.

    Args:
        prompt_cache: None is a new one.
        max_tokens: of the answer, without an end if they are -1.
        is_embedded: the prompt is given as embeddings.
        layers: the model's full-attention layers, where they are known; none are looked up.

    Raises: SnapKVError: options exclude each other, the prompt is empty, the model is not supported, its entries can't
        be quantised so, or a budget has no room for what is always kept.
    """
    options.require(model)
    reason = _reason(model, options, n_new, prompt_cache, max_tokens, is_embedded)
    if reason is not None:
        n_prompt = n_new + (n_tokens(prompt_cache or []) if options.turns else 0)
        return Plan(
            n_prompt=n_prompt,
            first=n_prompt,
            last=n_prompt,
            options=options,
            reason=reason,
            n_new=n_new,
        )
    require_compatible(options, When.COMPRESSING)
    if not layers:
        cache = make_prompt_cache(model) if prompt_cache is None else prompt_cache
        layers = attention_layers(model, cache)
    n_held = 0 if prompt_cache is None else layers[0].entries_in(prompt_cache).offset
    plan = _planned(model, options, layers, n_held + n_new, n_new)
    if options.quantization is not None:
        require_quantizable(model, layers, options.quantization)
    if plan.statistics_from is not None and any(layer.cap for layer in layers):
        raise UnsupportedModelError(
            f"{options.policy} can't score models that cap their logits, such as model type "
            f"{type_of(model)!r}: give another policy, such as snapkv"
        )
    return plan


def reason_to_leave(options: CompressionConfig, n_prompt: int) -> str | None:
    """Why a prompt of this length is left to mlx-lm, whatever the model; None if it is not."""
    return _reason(None, options, n_prompt, None, 0, False)


def plan_compression(
    options: CompressionConfig, layers: list[AttentionLayer], n_prompt: int
) -> Plan:
    """How caches of `n_prompt` tokens that were read by others are compressed, by the queries that come with them."""
    policy: Any = options.policy
    quota = policy.stages[1].quota(n_prompt)
    fits = n_prompt <= quota.entries
    return Plan(
        n_prompt=n_prompt,
        first=n_prompt,
        last=n_prompt,
        options=options,
        reason=fits_reason(n_prompt, policy.stages[1]) if fits else None,
        decode_quota=quota,
    )


def _reason(
    model: Any,
    options: CompressionConfig,
    n_new: int,
    prompt_cache: list | None,
    max_tokens: int,
    is_embedded: bool,
) -> str | None:
    """Why such a request is left to mlx-lm; None if it is not."""
    policy = options.policy
    if policy is None:
        return NO_POLICY_REASON
    if is_embedded:
        return EMBEDDINGS_REASON
    if prompt_cache is None or not (options.is_sparse or options.turns):
        return gate(policy, n_new, prompt_cache, max_tokens)
    if is_compressed(prompt_cache):
        return None
    return gate(policy, held_tokens(model, prompt_cache) + n_new, None, max_tokens)


def _planned(
    model: Any, options: CompressionConfig, layers: list[AttentionLayer], n_prompt: int, n_new: int
) -> Plan:
    """The plan of a prompt that is not left to mlx-lm."""
    policy: Any = options.policy
    voters = plan_prompt(policy, n_prompt)
    plan = Plan(
        **vars(voters),
        options=options,
        n_new=n_new,
        prefill_quota=policy.prefill_quota(n_prompt),
        decode_quota=policy.stages[1].quota(n_prompt),
    )
    if not options.is_sparse or not policy.reads_little:
        return plan
    return replace(
        plan, sparse_reading=_sparse_reading(plan, _cheap_entries(model, policy, layers))
    )


def _cheap_entries(model: Any, policy: Sparse, layers: list[AttentionLayer]) -> int:
    """Entries whose attention costs little; 0 where they are not asked for."""
    if policy.read_top_k is not None:
        return 0
    return entries_for(CHEAP, model, layers)


def _sparse_reading(plan: Plan, n_cheap: int) -> SparseReading:
    n, reach = plan.n_prompt, plan.policy.reach(plan.n_prompt, n_cheap)
    last = reach.of_last(in_files(plan.options.store))
    return SparseReading(reach, last, n - LAST, reach.before_choice(n, plan.n_held))
