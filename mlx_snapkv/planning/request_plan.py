"""The plan of a request: a frozen dataclass with every decision, made before the request runs.

Prefill, compression, decoding, memory estimates and messages to the user all follow the plan.
"""

from dataclasses import dataclass, replace
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import (
    AttentionLayer,
    attention_layers,
    is_compressed,
    n_tokens_read,
    require_quantizable,
)
from ..caches.matching import n_tokens
from ..compress.options import Compress
from ..compress.policy import Policy
from ..entries.quota import Quota
from ..errors import UnsupportedModelError
from ..models import type_of
from ..models.distributed import n_ranks
from ..sparse.options import (
    CHEAP_SHARE,
    CHUNK_SIZE,
    FIRST_TOKENS,
    LAST_TOKENS,
    Reach,
    Sparse,
)
from ..sparse.prompt_caches import in_files
from .config import CompressionConfig
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
SLOWER_REASON = (
    "sparse attention was slower than the full cache at this length on this machine; "
    "when=always uses it anyway"
)
EMBEDDINGS_REASON = "a prompt given as embeddings is not compressed"


@dataclass(frozen=True)
class SparseReading:
    """How many earlier entries the chunks of a prompt choose to read.

    Attributes:
        reach: maximum numbers of entries that a chunk reads. If there are no more than that, it reads all of them.
        last: the same for the prompt's last tokens, which start at position `last_from`.
        last_from: position of the first of the last tokens.
        n_before: number of tokens before the first chunk that chooses. It is the prompt length if no chunk does.
    """

    reach: Reach
    last: Reach
    last_from: int
    n_before: int


@dataclass(frozen=True, kw_only=True)
class Plan(PromptPlan):
    """All decisions about one request.

    Attributes:
        options: the request's config.
        reason: why the prompt is left to mlx-lm, or None if it is compressed. With a reason, the quotas are None.
        n_new: number of tokens to read after the earlier turns.
        prefill_quota: number of entries that each full-attention layer keeps during prefill.
        decode_quota: number of prompt entries that each full-attention layer keeps for the answer or, with sparse
            attention, that each answer token reads.
        sparse_reading: how prompt chunks choose entries. None if they read all entries.
        adapts: whether prompt chunks and answer tokens choose entries only while that is faster than reading all.
    """

    options: CompressionConfig
    reason: str | None = None
    n_new: int = 0
    prefill_quota: Quota = None  # type: ignore[assignment]  # a value unless there is a reason
    decode_quota: Quota = None  # type: ignore[assignment]
    sparse_reading: SparseReading | None = None
    adapts: bool = False

    @property
    def compress(self) -> Compress | None:
        """Return the setting if it is one or two policies, otherwise None."""
        return self.options.compress

    @property
    def sparse(self) -> Sparse | None:
        """Return the setting if it is sparse attention, otherwise None."""
        return self.options.sparse

    @property
    def prefill_policy(self) -> Policy:
        """Return the policy that evicts during prefill. Only valid for requests with a policy."""
        assert self.compress is not None
        return self.compress.policy

    @property
    def decode_policy(self) -> Policy:
        """Return the policy that evicts after prefill. Only valid for requests with a policy."""
        assert self.compress is not None
        return self.compress.decode_policy

    @property
    def n_ahead(self) -> int:
        """Return how many answer tokens are fed to the full caches before compression."""
        return FIRST_TOKENS if self.adapts else super().n_ahead

    @property
    def accumulates_attention(self) -> bool:
        """Return whether all of the prompt's queries vote."""
        return self.compress is not None and self.compress.accumulates_attention

    @property
    def keeps_shape(self) -> bool:
        """Return whether the caches keep their shape during decoding."""
        return self.compress is not None and self.compress.decode_policy.keeps_shape

    @property
    def n_held(self) -> int:
        """Return the number of tokens in earlier turns."""
        return self.n_prompt - self.n_new

    @property
    def observes(self) -> bool:
        """Return whether prompt queries are captured, either to vote or to choose what a chunk reads."""
        return self.compress is None or self.compress.observes

    @property
    def observes_answer(self) -> bool:
        """Return whether answer queries are captured, either to vote or to choose what a token reads."""
        return self.compress is None or self.compress.decode_policy.observes_answer

    @property
    def statistics_from(self) -> int | None:
        """Return the first position that counts in the policy's query statistics, or None if it uses none."""
        return None if self.compress is None else self.compress.statistics_from

    @property
    def capacity(self) -> int:
        """Return the number of entries to preallocate in each sparse-attention cache, including earlier turns.

        Unless the store is in memory, entries move to it chunk by chunk, starting with the first chunk that chooses.
        """
        whole, reading = self.n_prompt + self.n_ahead + 1, self.sparse_reading
        if reading is None or self.options.store == "memory":
            return whole
        return whole if reading.n_before == self.n_prompt else reading.n_before

    def chunk_size(self, limit: int | None) -> int:
        """Return the number of tokens per chunk, where `limit` is the caller's `prefill_step_size`."""
        if self.reason is not None:
            return limit or PREFILL_STEP_SIZE
        if self.compress is not None:
            return compressed_chunk_size(self.compress, limit, self, self.n_new)
        if self.sparse_reading is not None and not self.adapts:
            return CHUNK_SIZE
        largest = largest_chunk()
        size = min(limit or largest, largest)
        if self.sparse_reading is not None:
            return max(CHUNK_SIZE, size)  # sparse chunks are cut from chunks of this size
        return size_before_voters(size, self, self.n_new)


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
    """Plan a request that reads `n_new` tokens. The prompt cache is not changed.

    Args:
        model: an mlx-lm model. Its weights need not be loaded.
        options: the request's config.
        n_new: number of tokens to read.
        prompt_cache: the prompt cache to continue from, or None for a new one.
        max_tokens: maximum answer length in tokens, or -1 for no limit.
        is_embedded: whether the prompt is given as embeddings.
        layers: the model's full-attention layers. If missing or empty, they are looked up.

    Raises: SnapKVError: options conflict, the prompt is empty, the model is not supported, its entries can't be
        quantised this way, or a budget has no room for the sink and the recent window.
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
    options.require_compressible()
    if not layers:
        cache = make_prompt_cache(model) if prompt_cache is None else prompt_cache
        layers = attention_layers(model, cache)
    n_held = 0 if prompt_cache is None else layers[0].layer_cache_in(prompt_cache).offset
    plan = _planned(model, options, layers, n_held + n_new, n_new)
    if options.quantization is not None:
        require_quantizable(model, layers, options.quantization)
    if plan.statistics_from is not None and any(layer.logit_cap for layer in layers):
        raise UnsupportedModelError(
            f"{options.setting} can't score models that cap their logits, such as model type "
            f"{type_of(model)!r}: give another policy, such as snapkv"
        )
    return plan


def plan_compression(options: CompressionConfig, n_prompt: int) -> Plan:
    """Plan the compression of caches that mlx-lm has filled with `n_prompt` tokens."""
    policy = options.compress.decode_policy  # type: ignore[union-attr]  # callers pass a policy
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
    """Return why a request is left to mlx-lm, or None if it is compressed or sparse."""
    setting = options.setting
    if setting is None:
        return NO_POLICY_REASON
    if is_embedded:
        return EMBEDDINGS_REASON
    if prompt_cache is None or not (options.sparse is not None or options.turns):
        return reason_to_leave(setting, n_new, prompt_cache, max_tokens)
    if is_compressed(prompt_cache):
        return None
    n_prompt = n_tokens_read(model, prompt_cache) + n_new
    return reason_to_leave(setting, n_prompt, None, max_tokens)


def _planned(
    model: Any, options: CompressionConfig, layers: list[AttentionLayer], n_prompt: int, n_new: int
) -> Plan:
    """Plan a request that is not left to mlx-lm."""
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
        adapts=_adapts(options),
    )
    if not sparse.reads_sparsely:
        return plan
    n_cheap = 0 if sparse.read_top_k is not None else entries_for(CHEAP_SHARE, model, layers)
    return replace(plan, sparse_reading=_sparse_reading(plan, sparse, n_cheap))


def _adapts(options: CompressionConfig) -> bool:
    """Return whether a request with sparse attention may fall back to reading all entries.

    This requires a single Mac, because several Macs would all have to make the same decision. It also requires that
    entries are stored in memory, because other stores are slow at reading all entries.
    """
    sparse = options.sparse
    if sparse is None or sparse.store != "memory":
        return False
    return sparse.when == "faster" and n_ranks() == 1


def _sparse_reading(plan: Plan, sparse: Sparse, n_cheap: int) -> SparseReading:
    n, reach = plan.n_prompt, sparse.reach(plan.n_prompt, n_cheap)
    last = reach.of_last(in_files(plan.options.store))
    return SparseReading(reach, last, n - LAST_TOKENS, reach.before_choice(n, plan.n_held))
