"""The memory that a model's prompts will take, by length and policy, its weights loaded or not."""

import functools
from dataclasses import asdict, dataclass, replace
from typing import Any

from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START
from mlx_lm.models.cache import KVCache

from ..caches.layers import require_quantizable
from ..entries.attention import BLOCK_BYTES, ONE_PASS_BYTES
from ..entries.quantization import Quantization
from ..errors import SnapKVError
from ..models.counts import query_heads, vocabulary
from ..models.trained_length import trained_length
from ..policies import Method, SnapKV, Sparse, Stages, method_named, resolve_method
from ..policies.budgets import UNLIMITED
from .config import CompressionConfig
from .footprint import EntrySizes, Footprint, Need, weight_bytes
from .prompt_plan import PREFILL_STEP_SIZE
from .request_plan import Plan, SparseReading, plan_request
from .scores import scores_limit
from .shapes import layer_shapes

MAX_TOKENS = 256  # of an answer, as mlx-lm's own default

# Times a layer's keys and values. A growing full cache holds the old ones until they are copied, while the next
# layer's copy has begun. An evicting cache holds float32 keys to score, and the entries kept.
GROWN = 1.25
EVICTED = 3.0

# Times the logits of the queries that vote: of all entries at once, or of a block, of which many are under way.
VOTED = 2.25
VOTED_BLOCKS = 12
LEAST_BLOCK = 64  # entries

# Times the entries of a layer that a chunk reads sparsely: gathered, and joined with its own.
GATHERED = 2.0


@dataclass(frozen=True)
class MemoryPlan:
    """What a prompt of `context` tokens takes, in bytes."""

    context: int
    policy: str | None  # None is all entries, and no `kv_bits` unquantised ones
    store: str | None  # where sparse attention keeps all entries
    kv_bits: int | None
    weights: int
    kv: int  # once the prompt has been read, and compressed
    reading: int  # the most in use at once until then, the weights included
    answering: int  # and from then on
    reason: str | None = None  # why the policy leaves the prompt as it is, if it does

    @property
    def peak(self) -> int:
        return max(self.reading, self.answering)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"peak": self.peak}


class Planner:
    """Plans prompts of one model, its weights loaded or not; the options are those of `generate_step`."""

    def __init__(
        self,
        model: Any,
        *,
        kv_group_size: int = 64,
        max_tokens: int = MAX_TOKENS,
        prefill_step_size: int = PREFILL_STEP_SIZE,
    ):
        self.model, self._group_size = model, kv_group_size
        self.trained_length = trained_length(model)
        self._max_tokens, self._step_size = max_tokens, prefill_step_size
        self._sizes, self._weights = EntrySizes(model), weight_bytes(model)
        self.can_compress = self._sizes.refusal is None
        self._shapes, self._limit = layer_shapes(model, self._sizes), scores_limit()
        self._vocabulary = vocabulary(model)
        self._widest = max((*self._sizes.of_token(), *self._sizes.plain), default=0)
        self._heads = max((query_heads(layer.attention) for layer in self._sizes.layers), default=0)
        self._footprint = functools.cache(self._made)

    def plan(
        self, context: int, policy: Method | Stages | str | None = None, kv_bits: int | None = None
    ) -> MemoryPlan:
        """What a prompt of `context` tokens takes; arguments and errors as of `plan_memory`."""
        if context < 1:
            raise SnapKVError(f"context must be at least 1 token, got {context}")
        plan, _ = self.planned(
            context,
            CompressionConfig(method_named(policy) if isinstance(policy, str) else policy),
            kv_bits,
        )
        return replace(plan, policy=policy) if isinstance(policy, str) else plan

    def planned(
        self, context: int, config: CompressionConfig, kv_bits: int | None = None
    ) -> tuple[MemoryPlan, int]:
        """The same for a config, and the most bytes of its entries at once."""
        plan = plan_request(
            self.model,
            replace(config, quantization=self._quantization(kv_bits)),
            context,
            max_tokens=self._max_tokens,
            layers=self._sizes.layers,
        )
        return self.counted(plan)

    def counted(self, plan: Plan) -> tuple[MemoryPlan, int]:
        """What a request takes that goes so, and the most bytes of its entries at once."""
        chosen, how, context = plan.policy, plan.options.quantization, plan.n_prompt
        reason = None if chosen is None else plan.reason
        used = plan.options if reason is None else replace(plan.options, policy=None)
        footprint = self._footprint(used)
        need = footprint.need(plan, self._max_tokens)
        found = MemoryPlan(
            context,
            None if chosen is None else str(chosen),
            plan.options.store,
            None if how is None else how.bits,
            self._weights,
            self._kv(context, used, need),
            self._weights + self._reading(footprint, plan),
            self._weights + self._answering(footprint, plan),
            reason,
        )
        is_quantised = used.policy is None and how is not None  # by mlx-lm, which no need counts
        return found, found.kv if is_quantised else need.most

    def _made(self, config: CompressionConfig) -> Footprint:
        return Footprint(self._sizes, config, self._step_size)

    def _quantization(self, kv_bits: int | None) -> Quantization | None:
        if kv_bits is None:
            return None
        found = Quantization(kv_bits, self._group_size)
        require_quantizable(self.model, self._sizes.layers, found)
        return found

    def _kv(self, context: int, config: CompressionConfig, need: Need) -> int:
        if config.policy is None and context > DEFAULT_QUANTIZED_KV_START:
            return context * self._sizes.full(config.quantization)
        return need.kept + need.stays

    def _reading(self, footprint: Footprint, plan: Plan) -> int:
        """The most in use while a prompt is read, up to its last token, which is read with the answer."""
        n, how = max(1, plan.n_prompt - 1), footprint.quantization
        if plan.reason is not None:
            chunk = min(n, self._step_size)
            start = -(-DEFAULT_QUANTIZED_KV_START // chunk) * chunk  # of mlx-lm's own quantising
            ends = [(n, None)] if how is None or n <= start else [(start, None), (n, how)]
            return max(
                _rows(end) * self._sizes.full(bits)
                + int(GROWN * self._widest * end)
                + self._chunks(end, chunk)
                for end, bits in ends
            )
        in_blocks = plan.options.reads_in_blocks
        most, chunk = footprint.rows_read(plan), min(n, plan.chunk_size(self._step_size))
        entries = footprint.bytes_read(plan) + sum(self._sizes.plain) * _rows(n)
        if in_blocks:
            entries += int(EVICTED * self._widest * most)
        if plan.sparse_reading is not None:
            most, gathered = _read_at_once(plan, plan.sparse_reading)
            entries += int(
                GATHERED * self._widest * (gathered + chunk)
                + self._sizes.of_means() * footprint.with_rows(n)
            )
            most += chunk
        held = self._chunks(n, chunk, most, None if in_blocks else self._limit)
        if plan.options.accumulates_attention:
            held = max(held, self._counting(chunk, most))
        return max(entries + held, self._choosing(footprint, plan))

    def _choosing(self, footprint: Footprint, plan: Plan) -> int:
        """The most in use while a policy chooses among a layer's entries; all entries read are there until then."""
        sizes, most = self._sizes, footprint.rows_read(plan)
        if self._max_tokens < plan.n_ahead:  # the answer ends before
            return 0
        heads = self._heads
        entries = footprint.bytes_read(plan) + sum(sizes.plain) * _rows(plan.n_prompt)
        entries += self._widest * most  # a layer's, in order
        entries += footprint.stored(plan.n_prompt)
        if not plan.decode_policy.obs_window or plan.options.is_sparse:
            return entries
        queries = plan.n_voters * heads * sizes.of_head()
        logits = 4 * heads * plan.n_voters * most
        if logits <= ONE_PASS_BYTES:
            held = int(VOTED * logits)
        else:
            held = VOTED_BLOCKS * max(BLOCK_BYTES, 4 * heads * plan.n_voters * LEAST_BLOCK)
        return entries + queries + held

    def _answering(self, footprint: Footprint, plan: Plan) -> int:
        """The most in use while an answer is decoded."""
        n_prompt, sizes = plan.n_prompt, self._sizes
        before, rows = _rows(n_prompt - 1), _rows(n_prompt + self._max_tokens)
        if plan.reason is not None:
            how = footprint.quantization if n_prompt > DEFAULT_QUANTIZED_KV_START else None
            entries = rows * sizes.full(how) + self._widest * before * (rows > before)
            seen = n_prompt
        else:
            kept, last = footprint.kept(plan), plan.decode_policy
            entries = footprint.row_bytes * (kept + _added(last, kept, self._max_tokens))
            if plan.options.is_sparse:
                entries += footprint.stored(n_prompt + self._max_tokens)
                entries += footprint.means(plan)
            entries += sum(sizes.plain) * (n_prompt + _added(last, n_prompt, self._max_tokens))
            seen = max(kept, n_prompt) if sizes.plain else kept
        held = max(x.held(1, n_prompt, seen) for x in self._shapes)
        logits = 3 * 4 * self._vocabulary  # as they are, normalised, and what is sampled from
        return entries + sizes.rest(n_prompt + self._max_tokens, self._step_size) + logits + held

    def _chunks(self, n: int, chunk: int, most: int = UNLIMITED, limit: int | None = None) -> int:
        """Bytes held by the last whole chunk, or the rest after it, besides full caches of `most` entries."""
        whole, rest = n - n % chunk, n % chunk
        spans = [(chunk, chunk), (chunk, whole), (rest, n)]
        held = max(x.held(length, end, most, limit) for x in self._shapes for length, end in spans)
        return held + self._sizes.rest(n, chunk)

    def _counting(self, chunk: int, rows: int) -> int:
        """Bytes held to sum all queries' attention: that of early chunks is summed in one pass, up to 8 MiB."""
        step = max(x.scores for x in self._shapes) * chunk * min(chunk, rows)
        layers = min(len(self._sizes.layers), 7)  # as many as are under way at once
        passes = ONE_PASS_BYTES // step if step else 0
        return int(2.2 * layers * step * min(passes, -(-rows // chunk)))


def plan_memory(
    model: Any,
    context: int,
    policy: Method | Stages | str | None = None,
    *,
    snapkv: SnapKV | dict[str, Any] | str | bool | None = None,
    sparse: Sparse | dict[str, Any] | str | bool | None = None,
    kv_bits: int | None = None,
    **options: int,
) -> MemoryPlan:
    """How much memory a prompt will take on the default device, counted from the model's shapes (docs/benchmarks.md).

    Args:
        model: an mlx-lm model, its weights loaded or not.
        context: tokens of the prompt.
        policy, snapkv, sparse, kv_bits: as of `generate_step` but for "auto", and so are `kv_group_size`, `max_tokens`,
            `prefill_step_size`.

    Raises: SnapKVError: the policy can't serve the model or a prompt of this length, or reads it twice.
    """
    chosen = resolve_method(snapkv, policy, sparse)
    named = policy if isinstance(policy, str) else chosen
    return Planner(model, **options).plan(context, named, kv_bits)


def _read_at_once(plan: Plan, reading: SparseReading) -> tuple[int, int]:
    """Entries that a chunk of a prompt reads sparsely at most, the last tokens' among them; copies of how many."""
    most = min(plan.n_prompt, reading.last.most)
    everything = most == plan.n_prompt and plan.options.store == "memory"  # which is not gathered
    return most, reading.reach.most if everything else most


def _added(policy: Method, n: int, max_tokens: int) -> int:
    """Rows beside `n` for the answer's own entries."""
    if policy.keeps_shape:
        return 0
    return max_tokens + min(policy.block, n // 8) if policy.grows else policy.block


def _rows(n: int) -> int:
    return -(-n // KVCache.step) * KVCache.step
