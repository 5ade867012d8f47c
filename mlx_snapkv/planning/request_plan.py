"""A request's plan: the decisions that are made before the request runs.

Prefill, compression, decoding, memory estimates and messages to the user all follow the plan.
"""

from dataclasses import dataclass, replace
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import (
    AttentionLayer,
    attention_layers,
    is_compressed,
    n_tokens,
    require_quantizable,
)
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
    N_VOTERS,
    Reach,
    Sparse,
)
from ..sparse.prompt_caches import in_files, reads_sparsely
from .config import CompressionConfig
from .products import entries_costing
from .prompt_plan import (
    PREFILL_STEP_SIZE,
    align_chunks_to_voters,
    max_chunk_size,
    policy_chunk_size,
    policy_voters,
    reason_to_leave,
    too_short_reason,
    uncompressed_reason,
)

NO_POLICY_REASON = "no policy was given: pass snapkv or policy to compress"
FULL_CACHE_REASON = "the full cache was asked for"
SLOWER_REASON = (
    "earlier requests on this machine show that this answer takes longer with sparse attention; "
    "when=always uses it anyway"
)
EMBEDDINGS_REASON = "a prompt given as embeddings is not compressed"


@dataclass(frozen=True)
class SparseReading:
    """Limits on the earlier entries that each chunk of a prompt reads. Used with sparse prefill.

    Attributes:
        reach: how many earlier entries a chunk reads. If there are fewer, the chunk reads all of them.
        last_reach: how many earlier entries the prompt's last `LAST_TOKENS` tokens read.
        last_from: position where the prompt's last `LAST_TOKENS` tokens start. Negative if the prompt is shorter.
        n_before_choice: upper bound on the number of tokens before the first chunk that chooses entries; see
            `Reach.first_choice_position`.
    """

    reach: Reach
    last_reach: Reach
    last_from: int
    n_before_choice: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All decisions about one request.

    Attributes:
        n_prompt: number of tokens in the prompt, including earlier turns.
        config: the request's config.
        voters: positions of the queries that vote. With sparse attention, positions of the queries that the index is
            built from.
        reason: why the prompt is left to mlx-lm, or None if it is compressed or uses sparse attention. If there is a
            reason, `plan_request` leaves the quotas at None.
        n_new: number of tokens to read after the earlier turns.
        prefill_quota: number of entries that each full-attention layer keeps during prefill.
        decode_quota: number of prompt entries that each full-attention layer keeps for the answer. With sparse
            attention, the number that each answer token reads.
        sparse_reading: how prompt chunks choose entries. None if they read all entries.
        adapts: whether answer tokens choose entries only while that is faster than reading all entries.
    """

    n_prompt: int
    config: CompressionConfig
    voters: range = range(0)
    reason: str | None = None
    n_new: int = 0
    prefill_quota: Quota = None  # type: ignore[assignment]  # set by `plan_request` unless there is a reason
    decode_quota: Quota = None  # type: ignore[assignment]
    sparse_reading: SparseReading | None = None
    adapts: bool = False

    @property
    def is_left_to_mlx_lm(self) -> bool:
        """Return whether the prompt is left to mlx-lm. If so, `reason` says why."""
        return self.reason is not None

    @property
    def compress(self) -> Compress | None:
        """Return the setting if it is one or two policies, otherwise None."""
        return self.config.compress

    @property
    def sparse(self) -> Sparse | None:
        """Return the setting if it is sparse attention, otherwise None."""
        return self.config.sparse

    @property
    def prefill_policy(self) -> Policy:
        """Return the prefill policy; see `Compress`. Only valid for requests with a policy."""
        assert self.compress is not None
        return self.compress.policy

    @property
    def decode_policy(self) -> Policy:
        """Return the policy that evicts after prefill. Only valid for requests with a policy."""
        assert self.compress is not None
        return self.compress.decode_policy

    @property
    def n_fed_before_compression(self) -> int:
        """Return how many answer tokens are fed to the full caches before compression."""
        return FIRST_TOKENS if self.adapts else max(1, self.voters.stop - self.n_prompt)

    @property
    def n_decoded_before_compression(self) -> int:
        """Return how many answer tokens are decoded before compression.

        The prompt yields the first token, and each token that is fed yields one more.
        """
        return self.n_fed_before_compression + 1

    @property
    def accumulates_attention(self) -> bool:
        """Return whether all of the prompt's queries vote."""
        return self.compress is not None and self.compress.accumulates_attention

    @property
    def keeps_shape(self) -> bool:
        """Return whether the caches keep their shape during decoding."""
        return self.compress is not None and self.compress.decode_policy.keeps_shape

    @property
    def n_earlier(self) -> int:
        """Return the number of tokens in earlier turns."""
        return self.n_prompt - self.n_new

    @property
    def observes(self) -> bool:
        """Return whether prompt queries are captured, to vote or, with sparse attention, for the index and chunks."""
        return self.compress is None or self.compress.observes

    @property
    def observes_answer(self) -> bool:
        """Return whether answer queries are captured to vote, or to choose entries for a token."""
        return self.compress is None or self.compress.decode_policy.observes_answer

    @property
    def statistics_from(self) -> int | None:
        """Return the position where the policies' query statistics start.

        Return None if no policy needs statistics.
        """
        return None if self.compress is None else self.compress.statistics_from

    @property
    def capacity(self) -> int:
        """Return the number of entries that each sparse-attention cache allocates memory for.

        Entries of earlier turns are included. Unless the store is "memory", earlier entries move to the store before
        each chunk. Only with sparse prefill do they stay in the cache until a chunk chooses entries.
        """
        n_before_move = self.n_prompt
        if self.config.store != "memory":
            reading = self.sparse_reading
            n_before_move = self.n_earlier if reading is None else reading.n_before_choice
        if n_before_move < self.n_prompt:
            return n_before_move
        return self.n_prompt + self.n_decoded_before_compression

    def chunk_size(self, step_size: int | None) -> int:
        """Return the number of tokens per chunk. `step_size` is the caller's `prefill_step_size`."""
        if self.is_left_to_mlx_lm:
            return step_size or PREFILL_STEP_SIZE
        n_before_voters = self.voters.start - self.n_earlier
        if self.compress is not None:
            return policy_chunk_size(self.compress, step_size, self.n_new, n_before_voters)
        chunks_choose = self.sparse_reading is not None
        if chunks_choose:
            return CHUNK_SIZE
        return align_chunks_to_voters(max_chunk_size(step_size), self.n_new, n_before_voters)


def plan_request(
    model: Any,
    config: CompressionConfig,
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
        config: the request's config.
        n_new: number of tokens to read.
        prompt_cache: the prompt cache to continue from, or None for a new one.
        max_tokens: maximum answer length in tokens, or -1 for no limit.
        is_embedded: whether the prompt is given as embeddings.
        layers: the model's full-attention layers. If None or empty, they are looked up.

    Raises: SnapKVError: options conflict, the prompt is empty, the budget is too small, the prompt cache belongs to
        another model, or the model does not support the setting or the quantisation.
    """
    config.require_supported(model)
    reason = _reason_for_mlx_lm(model, config, n_new, prompt_cache, max_tokens, is_embedded)
    if reason is not None:
        n_prompt = n_new + (n_tokens(prompt_cache or []) if config.turns else 0)
        return Plan(n_prompt=n_prompt, config=config, reason=reason, n_new=n_new)
    config.require_compressible()
    if not layers:
        caches = make_prompt_cache(model) if prompt_cache is None else prompt_cache
        layers = attention_layers(model, caches)
    n_earlier = 0 if prompt_cache is None else layers[0].layer_cache_in(prompt_cache).offset
    n_prompt = n_earlier + n_new
    if config.sparse is not None:
        plan = _plan_sparse(model, config, config.sparse, layers, n_prompt, n_new)
    else:
        plan = _plan_with_policy(config, n_prompt, n_new)
    if config.quantization is not None:
        require_quantizable(model, layers, config.quantization)
    if plan.statistics_from is not None and any(layer.logit_cap for layer in layers):
        raise UnsupportedModelError(
            f"{config.setting} can't score models that cap their logits, such as model type "
            f"{type_of(model)!r}: give another policy, such as snapkv"
        )
    return plan


def plan_compression(config: CompressionConfig, n_prompt: int) -> Plan:
    """Plan the compression of caches that mlx-lm has filled with `n_prompt` tokens."""
    compress = config.compress
    assert compress is not None
    too_short = too_short_reason(compress, n_prompt)
    if too_short is not None:
        return Plan(n_prompt=n_prompt, config=config, reason=too_short)
    policy = compress.decode_policy
    quota = policy.quota(n_prompt)
    reason = uncompressed_reason(n_prompt, policy) if n_prompt <= quota.entries else None
    return Plan(n_prompt=n_prompt, config=config, reason=reason, decode_quota=quota)


def _reason_for_mlx_lm(
    model: Any,
    config: CompressionConfig,
    n_new: int,
    prompt_cache: list | None,
    max_tokens: int,
    is_embedded: bool,
) -> str | None:
    """Return why a request is left to mlx-lm, or None if it is compressed or uses sparse attention."""
    setting = config.setting
    if setting is None:
        return NO_POLICY_REASON
    if is_embedded:
        return EMBEDDINGS_REASON
    may_continue = config.sparse is not None or config.turns
    if prompt_cache is None or not may_continue:
        return reason_to_leave(setting, n_new, prompt_cache, max_tokens)
    if is_compressed(prompt_cache):
        return None
    attention_layers(model, prompt_cache)  # raises an error if the caches don't belong to the model
    n_prompt = n_tokens(prompt_cache) + n_new
    return reason_to_leave(setting, n_prompt, None, max_tokens)


def _plan_with_policy(config: CompressionConfig, n_prompt: int, n_new: int) -> Plan:
    """Plan a request that a policy compresses."""
    compress = config.compress
    assert compress is not None
    return Plan(
        n_prompt=n_prompt,
        config=config,
        voters=policy_voters(compress, n_prompt),
        n_new=n_new,
        prefill_quota=compress.prefill_quota(n_prompt),
        decode_quota=compress.decode_policy.quota(n_prompt),
    )


def _plan_sparse(
    model: Any,
    config: CompressionConfig,
    sparse: Sparse,
    layers: list[AttentionLayer],
    n_prompt: int,
    n_new: int,
) -> Plan:
    """Plan a request that uses sparse attention."""
    reading = None
    if reads_sparsely(sparse):
        n_cheap = 0
        if sparse.read_top_k is None:
            n_cheap = entries_costing(CHEAP_SHARE, model, layers)
        reach = sparse.reach(n_prompt, n_cheap)
        reading = SparseReading(
            reach=reach,
            last_reach=reach.for_last_tokens(in_files(sparse.store)),
            last_from=n_prompt - LAST_TOKENS,
            n_before_choice=reach.first_choice_position(n_prompt, n_prompt - n_new),
        )
    decode_quota = sparse.quota(n_prompt)
    # Only requests on a single machine adapt, because several Macs would all have to make the same decisions. The store
    # must be "memory", because reading all entries from another store is slow.
    may_adapt = n_ranks() == 1 and sparse.store == "memory"
    return Plan(
        n_prompt=n_prompt,
        config=config,
        voters=range(max(0, n_prompt - N_VOTERS), n_prompt),
        n_new=n_new,
        prefill_quota=replace(decode_quota, entries=max(decode_quota.entries, n_prompt)),
        decode_quota=decode_quota,
        sparse_reading=reading,
        adapts=may_adapt and sparse.when == "faster",
    )
