"""Estimates how much memory a request takes."""

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
from ..sparse.stores import STORES
from ..sparse.stores.memory import rows_to_grow_by
from .config import CompressionConfig
from .entry_sizes import EntrySizes
from .prompt_plan import PREFILL_STEP_SIZE
from .request_plan import Plan, plan_request
from .scores import scores_limit

# Safety factor for activations and for copies of entries. It is needed because MLX starts computing a layer before the
# previous layer's arrays are freed, and because the estimate leaves out norms, logits, votes, and freed buffers that
# can't be reused.
MARGIN = 2.5
KEY_MARGIN = 1.25  # safety factor for the dequantised keys of all layers


class Need(NamedTuple):
    """The memory in bytes that one request takes, not counting the model's weights."""

    extra_in_prefill: int  # needed for entries until compression, on top of `cache_bytes_at_end`
    kept_bytes: int  # size of the entries after compression, not counting `extra_in_answer`
    cache_bytes_at_end: int  # size of all caches after the answer, including unused rows
    keeps_shape: bool = False  # whether the caches keep their shape during decoding
    # Sparse attention: bytes of the prompt's entries, index, clusters and page means in memory. Other settings: 0.
    extra_in_answer: int = 0
    chunk_bytes: int = 0  # activations, scores and copied entries while a prompt chunk is read
    step_bytes: int = 0  # entries that are copied to decode one answer token

    @property
    def peak_entry_bytes(self) -> int:
        """Return the peak size of the entries."""
        return max(self.extra_in_prefill, self.extra_in_answer) + self.cache_bytes_at_end

    @property
    def prefill_peak(self) -> int:
        """Return the peak memory until the prompt has been compressed."""
        return self.cache_bytes_at_end + self.extra_in_prefill + self.chunk_bytes

    @property
    def answer_peak(self) -> int:
        """Return the peak memory after the prompt has been compressed."""
        return self.cache_bytes_at_end + self.extra_in_answer + self.step_bytes


@dataclass
class Footprint:
    """Estimates how much memory requests with a given config take.

    Attributes:
        sizes: entry sizes of the model.
        config: the config of the requests.
        step_size: maximum tokens per chunk.
        quantises_full: whether mlx-lm quantises long full caches. It does not do so in batches.
        row_bytes: KV bytes per token in the layers that can be compressed, with the quantisation from `config`.
    """

    sizes: EntrySizes
    config: CompressionConfig
    step_size: int = PREFILL_STEP_SIZE
    quantises_full: bool = False

    def __post_init__(self):
        """Compute `row_bytes`."""
        self.row_bytes = sum(self.sizes.bytes_by_layer(self.config.quantization))

    def plan(self, n_prompt: int, max_tokens: int = 0) -> Plan:
        """Plan a request that starts from an empty cache.

        Cached prefixes are not considered, because they may be evicted before the request starts.

        Raises: SnapKVError: see `plan_request`.
        """
        sizes = self.sizes
        return plan_request(
            sizes.model, self.config, n_prompt, max_tokens=max_tokens, layers=sizes.layers
        )

    def need(self, plan: Plan, max_tokens: int) -> Need:
        """Estimate the memory of a request whose answer has `max_tokens` tokens."""
        if plan.is_left_to_mlx_lm:
            return self._need_of_full_cache(plan, max_tokens)
        sizes = self.sizes
        n_prompt = plan.n_prompt
        n_kept = self.n_kept(plan)
        if plan.sparse is not None:  # all entries are stored, and the answer's cache grows
            kept_bytes = 0
            stored_bytes = self.stored_bytes(n_prompt)
            stored_bytes += self._cluster_bytes(plan) + self._page_mean_bytes(plan)
            n_rows_at_end = math.ceil(max_tokens / KVCache.step) * KVCache.step
        else:  # the kept entries are copied, and the answer's entries are appended
            kept_bytes = self.row_bytes * n_kept
            stored_bytes = 0
            n_rows_at_end = _n_rows_at_end(n_kept, plan, max_tokens)
        prefill_peak_bytes = self.prefill_peak_bytes(plan) + kept_bytes
        cache_bytes_at_end = self.row_bytes * n_rows_at_end
        n_full_rows = n_prompt + max_tokens + KVCache.step  # full caches grow in steps
        other_bytes_at_end = n_full_rows * sizes.incompressible_bytes
        other_bytes_at_end += sizes.window_and_state_bytes(n_full_rows, self.step_size)
        # Decoding a token may copy the entries of one layer. A layer that can't be compressed has entries for the whole
        # prompt.
        n_copied = n_prompt if sizes.incompressible_bytes else n_kept
        return Need(
            extra_in_prefill=max(0, prefill_peak_bytes - cache_bytes_at_end),
            kept_bytes=kept_bytes + n_prompt * sizes.incompressible_bytes,
            cache_bytes_at_end=cache_bytes_at_end + other_bytes_at_end,
            keeps_shape=plan.keeps_shape and not sizes.incompressible_bytes,
            extra_in_answer=stored_bytes,
            chunk_bytes=self._chunk_bytes(plan),
            step_bytes=int(MARGIN * sizes.widest_layer_bytes * n_copied)
            + self._dequantised_key_bytes(plan),
        )

    def _need_of_full_cache(self, plan: Plan, max_tokens: int) -> Need:
        """Estimate the memory of a request that is left to mlx-lm."""
        sizes = self.sizes
        n_prompt = plan.n_prompt
        is_quantised = self.quantises_full and n_prompt > DEFAULT_QUANTIZED_KV_START
        token_bytes = sizes.full_cache_bytes(self.config.quantization if is_quantised else None)
        n_rows = n_prompt + max_tokens + KVCache.step  # full caches grow in steps
        cache_bytes = n_rows * token_bytes + sizes.window_and_state_bytes(n_rows, self.step_size)
        extra_in_prefill = 0
        if is_quantised:
            # mlx-lm quantises after the first chunk that reaches DEFAULT_QUANTIZED_KV_START.
            n_unquantised = min(n_prompt, DEFAULT_QUANTIZED_KV_START + self.step_size)
            unquantised_bytes = n_unquantised * sizes.full_cache_bytes(None)
            extra_in_prefill = max(0, unquantised_bytes - cache_bytes)
        chunk_size = min(n_prompt, self.step_size)
        layer_bytes = max(
            shape.chunk_bytes(chunk_size, n_prompt, margin=MARGIN) for shape in sizes.shapes
        )
        # Full caches are copied when they grow.
        growth_bytes = int(MARGIN * sizes.widest_layer_bytes * n_prompt)
        return Need(
            extra_in_prefill=extra_in_prefill,
            kept_bytes=n_prompt * token_bytes,
            cache_bytes_at_end=cache_bytes,
            chunk_bytes=layer_bytes + growth_bytes,
            step_bytes=growth_bytes,
        )

    def _chunk_bytes(self, plan: Plan) -> int:
        """Return how many bytes a chunk needs on top of the caches.

        They are needed for activations, scores, and a copy of one layer's entries.
        """
        sizes = self.sizes
        n_prompt = plan.n_prompt
        reading = plan.sparse_reading
        chunk_size = min(n_prompt, plan.chunk_size(self.step_size))
        page_mean_bytes = 0
        if reading is not None:
            page_mean_bytes = int(sizes.page_mean_bytes() * self.n_indexed_in_memory(n_prompt))
        if reading is None:
            n_visible = self.n_prefill_rows(plan)
        else:
            n_chosen = min(n_prompt, max(reading.reach.max_read, reading.last_reach.max_read))
            n_visible = n_chosen + chunk_size
        copied_bytes = sizes.widest_layer_bytes * n_visible
        # Layers that can't be compressed attend to the whole prompt.
        max_visible = n_prompt if sizes.incompressible_bytes else n_visible
        # A policy that evicts in blocks never reads chunks in pieces, whatever the size of their scores.
        max_score_bytes = None if plan.config.evicts_in_blocks else scores_limit()
        layer_bytes = max(
            shape.chunk_bytes(chunk_size, max_visible, max_score_bytes, margin=MARGIN)
            for shape in sizes.shapes
        )
        # To accumulate attention, logits are computed in steps, each of which takes at most about this much memory.
        logit_bytes = ONE_PASS_BYTES if plan.accumulates_attention else 0
        return layer_bytes + int(MARGIN * (copied_bytes + page_mean_bytes)) + logit_bytes

    def prefix_bytes(self, n_tokens: int) -> int:
        """Return the size of a cached prefix of `n_tokens` tokens, including its files."""
        if self.config.compress is not None and not self.config.evicts_in_blocks:
            # The cached prefix keeps all entries. Each request compresses its own copy.
            with_full_cache = replace(self, config=CompressionConfig())
            return with_full_cache.prefix_bytes(n_tokens)
        if self.config.sparse is None:
            return self.need(self.plan(n_tokens), 0).cache_bytes_at_end
        sizes = self.sizes
        memory_bytes = self.stored_bytes(n_tokens) + n_tokens * sizes.incompressible_bytes
        memory_bytes += sizes.window_and_state_bytes(n_tokens, self.step_size)
        return memory_bytes + sizes.file_bytes(self.config.store, n_tokens)

    def stored_bytes(self, n_tokens: int) -> int:
        """Return the memory that sparse attention needs for the entries and the index of `n_tokens` tokens."""
        entry_bytes = self._stored_entry_bytes(n_tokens)
        if not ranks_by_index(n_tokens):
            return entry_bytes
        n_index_rows = rows_to_allocate(self.n_indexed_in_memory(n_tokens))
        return entry_bytes + n_index_rows * self.sizes.key_index_bytes()

    @property
    def _store_is_quantised(self) -> bool:
        """Return whether sparse attention keeps quantised entries in memory."""
        store = self.config.store
        return store is not None and STORES[store].bits is not None

    def _stored_entry_bytes(self, n_tokens: int) -> int:
        """Return the memory that a store needs for `n_tokens` entries, including unused rows."""
        n_spare = 0
        if self._store_is_quantised:
            n_spare = rows_to_grow_by(n_tokens)
        return (n_tokens + n_spare) * self.sizes.memory_bytes(self.config.store)

    def _dequantised_key_bytes(self, plan: Plan) -> int:
        """Return the size in bytes of keys that a token dequantises to rank them.

        Without an index, each layer dequantises all of its keys, and nothing waits for a layer before the next one
        starts. So the keys of all layers may be in memory at once.
        """
        if not self._store_is_quantised or ranks_by_index(plan.n_prompt):
            return 0
        entry_bytes = plan.n_prompt * sum(self.sizes.bytes_by_layer())
        return int(KEY_MARGIN * entry_bytes / 2)  # half of an entry is its key

    def _cluster_bytes(self, plan: Plan) -> int:
        """Return the size of the cluster ids and cluster means, or 0 if the `residual` option of `Sparse` is None."""
        if plan.sparse is None or plan.sparse.residual is None:
            return 0
        return int(plan.n_prompt * self.sizes.cluster_bytes())

    def _page_mean_bytes(self, plan: Plan) -> int:
        """Return the size in bytes of the page means that stay in memory for later turns, or 0 if none do.

        Page means stay if entries are in files and chunks choose pages.
        """
        reading = plan.sparse_reading
        chunks_choose = reading is not None and reading.n_before_choice < plan.n_prompt
        if not chunks_choose or not in_files(self.config.store):
            return 0
        return int(self.n_indexed_in_memory(plan.n_prompt) * self.sizes.page_mean_bytes())

    def n_indexed_in_memory(self, n_tokens: int) -> int:
        """Return an upper bound on how many of `n_tokens` tokens have their index rows and page means in memory.

        If entries are in files, only the first `ENTRIES_IN_MEMORY` tokens keep these in memory. The index rows and page
        means of later tokens move to a file, `ENTRIES_MOVED` tokens at a time.
        """
        if not in_files(self.config.store):
            return n_tokens
        return min(n_tokens, ENTRIES_IN_MEMORY + ENTRIES_MOVED)

    def n_kept(self, plan: Plan) -> int:
        """Return how many prompt entries an answer token reads per KV head, in a layer that can be compressed."""
        return min(plan.n_prompt, plan.decode_quota.entries)

    def prefill_peak_bytes(self, plan: Plan) -> int:
        """Return the peak size of the entries during prefill, in the layers that can be compressed."""
        if plan.sparse is not None:
            store_bytes = self._stored_entry_bytes(plan.n_prompt)
            if self.config.store == "memory":
                return store_bytes
            # Each chunk moves the earlier entries to the store. With sparse prefill, entries stay in the caches until a
            # chunk first chooses entries.
            reading = plan.sparse_reading
            chunk_size = plan.chunk_size(self.step_size)
            n_unstored = chunk_size if reading is None else reading.n_before_choice
            n_rows = max(KVCache.step, min(n_unstored, plan.n_prompt))
            return store_bytes + n_rows * sum(self.sizes.bytes_by_layer())
        # Caches that evict during prefill are quantised from the start, others only at compression.
        is_quantised = self.config.evicts_in_blocks
        row_bytes = self.row_bytes if is_quantised else sum(self.sizes.bytes_by_layer())
        return row_bytes * self.n_prefill_rows(plan)

    def n_prefill_rows(self, plan: Plan) -> int:
        """Return the maximum number of entries per compressed layer during prefill."""
        n_answer = plan.n_decoded_before_compression
        n_between_evictions = 1 if plan.compress is None else plan.compress.policy.block
        n_without_eviction = plan.n_prompt + n_answer
        n_with_eviction = plan.prefill_quota.entries + max(n_between_evictions, n_answer)
        return min(n_without_eviction, n_with_eviction)


def _n_rows_at_end(n_kept: int, plan: Plan, max_tokens: int) -> int:
    """Return how many rows a cache with `n_kept` prompt entries has after the answer.

    Unused rows are included.
    """
    if plan.keeps_shape:
        return n_kept
    if plan.compress is None or plan.compress.decode_policy.grows:
        return rows_to_allocate(n_kept + max_tokens)
    budget = plan.decode_quota.entries
    n_most = budget + plan.decode_policy.block  # the cache evicts before it would have more entries
    n_rows = rows_to_allocate(min(n_kept + max_tokens, n_most))
    if n_kept >= budget:  # the cache allocates the rows for a whole block at once
        n_rows = max(n_rows, n_most)
    return n_rows
