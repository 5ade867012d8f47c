"""Estimates the memory of a request."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START
from mlx_lm.models.cache import KVCache

from ..entries.attention import ONE_PASS_BYTES
from ..entries.quantization import rows_to_allocate
from ..sparse.growing_rows import ENTRIES_IN_MEMORY, ENTRIES_MOVED
from ..sparse.index import ranks_by_index
from ..sparse.prompt_caches import in_files
from .config import CompressionConfig
from .entry_sizes import EntrySizes
from .prompt_plan import PREFILL_STEP_SIZE
from .request_plan import Plan, plan_request
from .scores import scores_limit

# Safety factor for activations and copies. MLX starts on a layer before the arrays of the previous one are freed, and
# the estimate leaves out norms, logits, votes, and freed buffers that can't be reused.
MARGIN = 2.5


class Need(NamedTuple):
    """The memory of one request in bytes, not counting the model's weights."""

    extra_in_prefill: int  # entries on top of `caches` until the prompt is compressed
    kept: int  # entries after compression
    caches: int  # all caches at the end of the answer, including unused rows
    keeps_shape: bool = False  # whether the caches keep their shape during decoding
    extra_in_answer: int = 0  # entries on top of `caches` that answer tokens choose among
    chunk: int = 0  # activations, scores and copies for one prompt chunk
    step: int = 0  # copies for one answer token

    @property
    def peak_entries(self) -> int:
        """Return the peak size of the entries."""
        return max(self.extra_in_prefill, self.extra_in_answer) + self.caches

    @property
    def prefill_peak(self) -> int:
        """Return the peak memory until the prompt has been compressed."""
        return self.caches + self.extra_in_prefill + self.chunk

    @property
    def answer_peak(self) -> int:
        """Return the peak memory after the prompt has been compressed."""
        return self.caches + self.extra_in_answer + self.step


@dataclass
class Footprint:
    """Estimates the memory of requests with a given config.

    Attributes:
        sizes: entry sizes of the model.
        config: the config of the requests.
        step_size: maximum tokens per chunk.
        quantises_full: whether mlx-lm quantises long full caches. It does not do so in batches.
        row_bytes: KV bytes per token in the layers that can be compressed.

    Raises: UnsupportedModelError: the config has a setting, but the model can't be compressed.
    """

    sizes: EntrySizes
    config: CompressionConfig
    step_size: int = PREFILL_STEP_SIZE
    quantises_full: bool = False

    def __post_init__(self):
        """Compute `row_bytes`. Raises: UnsupportedModelError: see the class."""
        self.quantization = self.config.quantization
        if self.config.setting is not None and self.sizes.refusal is not None:
            raise self.sizes.refusal
        self.row_bytes = sum(self.sizes.of_token(self.quantization))

    def plan(self, n_prompt: int, max_tokens: int = 0) -> Plan:
        """Plan a request that starts from an empty cache.

        Cached prefixes are not considered, because they may be evicted before the request starts.

        Raises: SnapKVError: the setting does not support the request.
        """
        sizes = self.sizes
        return plan_request(
            sizes.model, self.config, n_prompt, max_tokens=max_tokens, layers=sizes.layers
        )

    def need(self, plan: Plan, max_tokens: int) -> Need:
        """Estimate the memory of a request whose answer has `max_tokens` tokens."""
        if plan.reason is not None:
            return self._need_of_full(plan, max_tokens)
        if self.config.sparse is not None:
            return self._need_of_sparse(plan, max_tokens)
        return self._need_of_policy(plan, max_tokens)

    def _need_of_sparse(self, plan: Plan, max_tokens: int) -> Need:
        """Estimate a sparse request, which keeps all entries and adds a growing cache for the answer."""
        n_answer = math.ceil(max_tokens / KVCache.step) * KVCache.step
        return self._need_of_both(
            plan,
            max_tokens,
            kept=0,
            held=self.row_bytes * n_answer,
            at_compression=self.bytes_read(plan),
            stays=self.stored(plan.n_prompt) + self.means(plan),
        )

    def _need_of_policy(self, plan: Plan, max_tokens: int) -> Need:
        """Estimate a request with a policy, which copies the kept entries and appends the answer's."""
        n_kept = self.kept(plan)
        kept = self.row_bytes * n_kept
        return self._need_of_both(
            plan,
            max_tokens,
            kept=kept,
            held=self.row_bytes * _grown(n_kept, plan, max_tokens),
            at_compression=self.bytes_read(plan) + kept,
        )

    def _need_of_both(
        self,
        plan: Plan,
        max_tokens: int,
        *,
        kept: int,
        held: int,
        at_compression: int,
        stays: int = 0,
    ) -> Need:
        """Estimate the memory of all layers, given the sizes for the compressible ones.

        Args:
            plan: the request's plan.
            max_tokens: answer length in tokens.
            kept: size of the entries after compression, in bytes.
            held: size of the caches at the end of the answer, in bytes.
            at_compression: peak size of the entries until compression, in bytes.
            stays: size of the entries that answer tokens choose among, in bytes.
        """
        sizes = self.sizes
        n_prompt = plan.n_prompt
        n_total = n_prompt + max_tokens + KVCache.step  # full caches grow by `step` tokens
        plain = sum(sizes.plain)
        n_copied = n_prompt if sizes.plain else self.kept(plan)
        return Need(
            extra_in_prefill=max(0, at_compression - held),
            kept=kept + n_prompt * plain,
            caches=held + n_total * plain + sizes.rest(n_total, self.step_size),
            keeps_shape=plan.keeps_shape and not sizes.plain,
            extra_in_answer=stays,
            chunk=self._chunk(plan),
            step=int(MARGIN * sizes.of_widest * n_copied),
        )

    def _need_of_full(self, plan: Plan, max_tokens: int) -> Need:
        """Estimate a request that is left to mlx-lm."""
        sizes = self.sizes
        n_prompt = plan.n_prompt
        n_total = n_prompt + max_tokens + KVCache.step  # full caches grow by `step` tokens
        is_quantised = self.quantises_full and n_prompt > DEFAULT_QUANTIZED_KV_START
        token_bytes = sizes.full(self.quantization if is_quantised else None)
        caches = n_total * token_bytes + sizes.rest(n_total, self.step_size)
        extra = 0
        if is_quantised:
            # mlx-lm quantises after the first chunk that reaches DEFAULT_QUANTIZED_KV_START.
            n_unquantised = min(n_prompt, DEFAULT_QUANTIZED_KV_START + self.step_size)
            extra = max(0, n_unquantised * sizes.full(None) - caches)
        chunk = min(n_prompt, self.step_size)
        copied = int(MARGIN * sizes.of_widest * n_prompt)  # a growing cache is copied
        return Need(
            extra_in_prefill=extra,
            kept=n_prompt * token_bytes,
            caches=caches,
            chunk=max(x.chunk_bytes(chunk, n_prompt, margin=MARGIN) for x in sizes.shapes) + copied,
            step=copied,
        )

    def _chunk(self, plan: Plan) -> int:
        """Return what a chunk takes on top of its entries: activations, scores, and a copy of one layer's entries."""
        sizes = self.sizes
        n_prompt = plan.n_prompt
        reading = plan.sparse_reading
        chunk = min(n_prompt, plan.chunk_size(self.step_size))
        means = 0
        if reading is not None:
            means = int(sizes.of_means() * self.index_rows_in_memory(n_prompt))
        if reading is None or plan.adapts:
            n_seen = self.rows_read(plan)
        else:
            n_seen = min(n_prompt, max(reading.reach.most, reading.last.most)) + chunk
        copied = sizes.of_widest * n_seen
        # Layers that can't be compressed attend to the whole prompt.
        most_seen = n_prompt if sizes.plain else n_seen
        # Blocks are never split, so their scores have no limit.
        limit = None if plan.options.evicts_in_blocks else scores_limit()
        held = max(x.chunk_bytes(chunk, most_seen, limit, margin=MARGIN) for x in sizes.shapes)
        # Attention is accumulated from logits, which are computed in blocks of this size.
        counting = ONE_PASS_BYTES if plan.accumulates_attention else 0
        return held + int(MARGIN * (copied + means)) + counting

    def of_prefix(self, n: int) -> int:
        """Return the size of a cached prefix of `n` tokens, in memory and in files."""
        if self.config.compress is not None and not self.config.evicts_in_blocks:
            # The cached prefix keeps all entries. Each request compresses its own copy.
            return replace(self, config=CompressionConfig()).of_prefix(n)
        if self.config.sparse is None:
            return self.need(self.plan(n), 0).caches
        sizes = self.sizes
        held = self.stored(n) + n * sum(sizes.plain) + sizes.rest(n, self.step_size)
        return held + sizes.of_files(self.config.store, n)

    def stored(self, n: int) -> int:
        """Return the memory that sparse attention needs for the entries and the index of `n` tokens."""
        if self.config.store is None:
            return 0
        entry_bytes = n * self.sizes.in_memory(self.config.store)
        if not ranks_by_index(n):
            return entry_bytes
        n_rows_allocated = rows_to_allocate(self.index_rows_in_memory(n))
        return entry_bytes + n_rows_allocated * self.sizes.of_index()

    def means(self, plan: Plan) -> int:
        """Return the memory for cluster means and page means."""
        return self._cluster_means(plan) + self._page_means(plan)

    def _cluster_means(self, plan: Plan) -> int:
        """Return the size of the cluster means, which replace unread entries."""
        if plan.sparse is None or plan.sparse.residual is None:
            return 0
        return int(plan.n_prompt * self.sizes.of_clusters())

    def _page_means(self, plan: Plan) -> int:
        """Return the size of the page means. They are only stored for entries in files, if chunks choose pages."""
        reading = plan.sparse_reading
        if reading is None or reading.n_before == plan.n_prompt or not in_files(self.config.store):
            return 0
        return int(self.index_rows_in_memory(plan.n_prompt) * self.sizes.of_means())

    def index_rows_in_memory(self, n: int) -> int:
        """Return how many of `n` tokens have their index and means in memory. There is a limit for entries in files."""
        return min(n, ENTRIES_IN_MEMORY + ENTRIES_MOVED) if in_files(self.config.store) else n

    def kept(self, plan: Plan) -> int:
        """Return how many prompt entries per KV head an answer token reads in a compressed layer."""
        return min(plan.n_prompt, plan.decode_quota.entries)

    def bytes_read(self, plan: Plan) -> int:
        """Return the peak size of the entries during prefill, in the layers that can be compressed."""
        reading = plan.sparse_reading
        if reading is not None:
            # Starting with the first chunk that chooses, entries move to the store chunk by chunk.
            stored = plan.n_prompt * self.sizes.in_memory(self.config.store)
            if self.config.store == "memory":
                return stored
            return stored + reading.n_before * sum(self.sizes.of_token())
        # Caches that evict during prefill are quantised from the start, all others at compression.
        is_quantised = self.config.evicts_in_blocks
        row_bytes = self.row_bytes if is_quantised else sum(self.sizes.of_token())
        return row_bytes * self.rows_read(plan)

    def rows_read(self, plan: Plan) -> int:
        """Return the maximum number of entries per compressed layer during prefill."""
        block = 1 if plan.compress is None else plan.compress.policy.block
        n_answer = plan.n_ahead + 1  # answer tokens before compression
        return min(
            plan.n_prompt + n_answer,
            plan.prefill_quota.entries + max(block, n_answer),
        )


def _grown(n: int, plan: Plan, max_tokens: int) -> int:
    """Return how many rows a cache of `n` entries has after `max_tokens` answer tokens, including unused rows."""
    if plan.keeps_shape:
        return n
    n_new = max_tokens
    if plan.compress is not None and not plan.compress.decode_policy.grows:
        n_new = min(max_tokens, plan.decode_policy.block)  # the cache evicts after each block
    return rows_to_allocate(n + n_new)
