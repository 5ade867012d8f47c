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
from ..compress.options import Compress
from ..compress.policy import Policy
from ..entries.quota import Quota
from ..errors import UnsupportedModelError
from ..models import type_of
from ..sparse.options import CHEAP_SHARE, CHUNK_SIZE, LAST_TOKENS, Reach, Sparse
from ..sparse.prompt_caches import in_files
from .config import CompressionConfig
from .exclusions import When, require_compatible
from .products import entries_for
from .prompt_plan import (
    PREFILL_STEP_SIZE,
    PromptPlan,
    compressed_chunk_size,
    compressed_voters,
    fits_reason,
    reason_to_leave,
    size_before_voters,
    sparse_voters,
)
from .scores import largest_chunk

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
        options: what was asked for: the setting, and where sparse attention keeps entries.
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
    def compress(self) -> Compress | None:
        return self.options.compress

    @property
    def sparse(self) -> Sparse | None:
        return self.options.sparse

    @property
    def prefill_policy(self) -> Policy:
        """Return the policy that evicts while the prompt is read; only of a request that compresses."""
        assert self.compress is not None
        return self.compress.policy

    @property
    def decode_policy(self) -> Policy:
        """Return the policy that evicts once the prompt has been read; only of a request that compresses."""
        assert self.compress is not None
        return self.compress.decode_policy

    @property
    def accumulates_attention(self) -> bool:
        """Return whether all queries of the prompt vote."""
        return self.compress is not None and self.compress.accumulates_attention

    @property
    def keeps_shape(self) -> bool:
        """Return whether the shape of the answer's caches is constant."""
        return self.compress is not None and self.compress.decode_policy.keeps_shape

    @property
    def n_held(self) -> int:
        """Tokens of earlier turns."""
        return self.n_prompt - self.n_new

    @property
    def observes(self) -> bool:
        """Return whether queries of the prompt are captured: to vote, or for chunks that choose what they read."""
        return self.compress is None or self.compress.observes

    @property
    def observes_answer(self) -> bool:
        """Return whether queries of the answer are captured: to vote at evictions, or to choose what a token reads."""
        return self.compress is None or self.compress.decode_policy.observes_answer

    @property
    def statistics_from(self) -> int | None:
        """Return the first position whose queries count in the statistics that a policy asks for, if one does."""
        return None if self.compress is None else self.compress.statistics_from

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
        if self.compress is not None:
            return compressed_chunk_size(self.compress, limit, self, self.n_new)
        if self.sparse_reading is not None:
            return CHUNK_SIZE  # the last tokens come in a call of their own
        largest = largest_chunk()
        return size_before_voters(min(limit or largest, largest), self, self.n_new)


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
            f"{options.setting} can't score models that cap their logits, such as model type "
            f"{type_of(model)!r}: give another policy, such as snapkv"
        )
    return plan


def plan_compression(
    options: CompressionConfig, layers: list[AttentionLayer], n_prompt: int
) -> Plan:
    """How caches of `n_prompt` tokens that were read by others are compressed, by the queries that come with them."""
    policy = options.compress.decode_policy  # type: ignore[union-attr]  # the caller's is a policy
    quota = policy.quota(n_prompt)
    fits = n_prompt <= quota.entries
    return Plan(
        n_prompt=n_prompt,
        first=n_prompt,
        last=n_prompt,
        options=options,
        reason=fits_reason(n_prompt, policy) if fits else None,
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
    """Return why such a request is left to mlx-lm; None if it is not."""
    setting = options.setting
    if setting is None:
        return NO_POLICY_REASON
    if is_embedded:
        return EMBEDDINGS_REASON
    if prompt_cache is None or not (options.sparse is not None or options.turns):
        return reason_to_leave(setting, n_new, prompt_cache, max_tokens)
    if is_compressed(prompt_cache):
        return None
    n_prompt = held_tokens(model, prompt_cache) + n_new
    return reason_to_leave(setting, n_prompt, None, max_tokens)


def _planned(
    model: Any, options: CompressionConfig, layers: list[AttentionLayer], n_prompt: int, n_new: int
) -> Plan:
    """Return the plan of a prompt that is not left to mlx-lm."""
    if (compress := options.compress) is not None:
        return Plan(
            **vars(compressed_voters(compress, n_prompt)),
            options=options,
            n_new=n_new,
            prefill_quota=compress.prefill_quota(n_prompt),
            decode_quota=compress.decode_policy.quota(n_prompt),
        )
    sparse: Any = options.sparse
    quota = sparse.quota(n_prompt)
    plan = Plan(
        **vars(sparse_voters(n_prompt)),
        options=options,
        n_new=n_new,
        prefill_quota=replace(quota, entries=max(quota.entries, n_prompt)),
        decode_quota=quota,
    )
    if not sparse.reads_sparsely:
        return plan
    n_cheap = 0 if sparse.read_top_k is not None else entries_for(CHEAP_SHARE, model, layers)
    return replace(plan, sparse_reading=_sparse_reading(plan, sparse, n_cheap))


def _sparse_reading(plan: Plan, sparse: Sparse, n_cheap: int) -> SparseReading:
    n, reach = plan.n_prompt, sparse.reach(plan.n_prompt, n_cheap)
    last = reach.of_last(in_files(plan.options.store))
    return SparseReading(reach, last, n - LAST_TOKENS, reach.before_choice(n, plan.n_held))
