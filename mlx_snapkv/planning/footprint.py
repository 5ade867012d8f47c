"""Estimating the bytes that a request will take in memory."""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START
from mlx_lm.models.cache import KVCache

from ..entries.attention import ONE_PASS_BYTES
from ..entries.quantization import with_room
from ..sparse.growing_rows import ENTRIES_IN_MEMORY, ENTRIES_MOVED
from ..sparse.index import ranks_by_index
from ..sparse.prompt_caches import in_files
from .config import CompressionConfig
from .entry_sizes import EntrySizes
from .prompt_plan import PREFILL_STEP_SIZE
from .request_plan import Plan, plan_request
from .scores import scores_limit

# Bytes of activations and copies for each that is counted. MLX begins a layer while arrays of the one before are still
# there, and norms, logits, votes and freed buffers that do not fit what comes next are not counted.
MARGIN = 2.5


class Need(NamedTuple):
    """The bytes that one request takes, without the model's weights."""

    reading: int  # entries beyond `held` until the prompt has been compressed
    kept: int  # entries after the compression
    held: int  # all caches when the answer ends, with their spare room
    fixed: bool = False  # whether the caches keep their shape during the answer
    stays: int = 0  # entries beyond `held` from which the answer's tokens choose
    chunk: int = 0  # activations, scores and copies of a chunk of the prompt
    step: int = 0  # copies that a token of the answer makes

    @property
    def most(self) -> int:
        """Return the most bytes of entries at once."""
        return max(self.reading, self.stays) + self.held

    @property
    def in_prefill(self) -> int:
        """Return the most bytes in use until the prompt has been compressed."""
        return self.held + self.reading + self.chunk

    @property
    def in_answer(self) -> int:
        """Return the most bytes in use after the prompt has been compressed."""
        return self.held + self.stays + self.step


@dataclass
class Footprint:
    """The bytes that requests with a config take.

    Attributes:
        step_size: tokens of a chunk at most.
        quantises_full: whether mlx-lm quantises long full caches; in batches it does not.
        row_bytes: bytes of a token's entries in the layers that can be compressed.

    Raises: UnsupportedModelError: the config has a setting, and the model's entries can't be compressed.
    """

    sizes: EntrySizes
    config: CompressionConfig
    step_size: int = PREFILL_STEP_SIZE
    quantises_full: bool = False

    def __post_init__(self):
        """Compute the bytes of a row. Raises: UnsupportedModelError: see the class."""
        self.quantization = self.config.quantization
        if self.config.setting is not None and self.sizes.refusal is not None:
            raise self.sizes.refusal
        self.row_bytes = sum(self.sizes.of_token(self.quantization))

    def plan(self, n_prompt: int, max_tokens: int = 0) -> Plan:
        """Return the plan of a request on an empty cache, since a stored prefix may be gone when the request starts.

        Raises: SnapKVError: the setting can't serve the request.
        """
        sizes = self.sizes
        return plan_request(
            sizes.model, self.config, n_prompt, max_tokens=max_tokens, layers=sizes.layers
        )

    def need(self, plan: Plan, max_tokens: int) -> Need:
        """Return the bytes that a request with an answer of `max_tokens` takes."""
        if plan.reason is not None:
            return self._need_of_full(plan, max_tokens)
        if self.config.sparse is not None:
            return self._need_of_sparse(plan, max_tokens)
        return self._need_of_policy(plan, max_tokens)

    def _need_of_sparse(self, plan: Plan, max_tokens: int) -> Need:
        """Return the bytes of a request whose entries all stay; those of the answer are in a cache that grows."""
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
        """Return the bytes of a request whose policy keeps copies of a few entries, to which the answer's are added."""
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
        """Return the bytes of all layers, given the bytes of the layers that can be compressed.

        Args:
            plan: the request's plan.
            max_tokens: number of tokens of the answer.
            kept: bytes of entries after the compression.
            held: bytes of the caches when the answer ends.
            at_compression: most bytes of entries until the compression.
            stays: bytes of entries that the answer's tokens choose from.
        """
        sizes = self.sizes
        n_prompt = plan.n_prompt
        n_total = n_prompt + max_tokens + KVCache.step  # full caches grow by `step` tokens
        plain = sum(sizes.plain)
        n_copied = n_prompt if sizes.plain else self.kept(plan)
        return Need(
            reading=max(0, at_compression - held),
            kept=kept + n_prompt * plain,
            held=held + n_total * plain + sizes.rest(n_total, self.step_size),
            fixed=plan.keeps_shape and not sizes.plain,
            stays=stays,
            chunk=self._chunk(plan),
            step=int(MARGIN * sizes.of_widest * n_copied),
        )

    def _need_of_full(self, plan: Plan, max_tokens: int) -> Need:
        """Return the bytes of a request whose prompt is left to mlx-lm."""
        sizes = self.sizes
        n_prompt = plan.n_prompt
        n_total = n_prompt + max_tokens + KVCache.step  # full caches grow by `step` tokens
        is_quantised = self.quantises_full and n_prompt > DEFAULT_QUANTIZED_KV_START
        token_bytes = sizes.full(self.quantization if is_quantised else None)
        held = n_total * token_bytes + sizes.rest(n_total, self.step_size)
        reading = 0
        if is_quantised:
            # mlx-lm quantises after the first chunk that reaches DEFAULT_QUANTIZED_KV_START.
            n_unquantised = min(n_prompt, DEFAULT_QUANTIZED_KV_START + self.step_size)
            reading = max(0, n_unquantised * sizes.full(None) - held)
        chunk = min(n_prompt, self.step_size)
        copied = int(MARGIN * sizes.of_widest * n_prompt)  # a cache that grows is copied
        return Need(
            reading=reading,
            kept=n_prompt * token_bytes,
            held=held,
            chunk=max(x.held(chunk, n_prompt, margin=MARGIN) for x in sizes.shapes) + copied,
            step=copied,
        )

    def _chunk(self, plan: Plan) -> int:
        """Return the bytes that a chunk holds beside entries: activations, scores, and a copy of a layer's entries."""
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
        # Layers whose entries can't be compressed see the whole prompt.
        most_seen = n_prompt if sizes.plain else n_seen
        # Blocks are never read in pieces, so nothing limits their scores.
        limit = None if plan.options.evicts_in_blocks else scores_limit()
        held = max(x.held(chunk, most_seen, limit, margin=MARGIN) for x in sizes.shapes)
        # Attention is counted from logits, which are computed in blocks of this size.
        counting = ONE_PASS_BYTES if plan.accumulates_attention else 0
        return held + int(MARGIN * (copied + means)) + counting

    def of_prefix(self, n: int) -> int:
        """Return the bytes, in memory and files, of a prefix of `n` tokens that requests can continue from."""
        if self.config.compress is not None and not self.config.evicts_in_blocks:
            # All entries are kept, and each request compresses a copy.
            return replace(self, config=CompressionConfig()).of_prefix(n)
        if self.config.sparse is None:
            return self.need(self.plan(n), 0).held
        sizes = self.sizes
        held = self.stored(n) + n * sum(sizes.plain) + sizes.rest(n, self.step_size)
        return held + sizes.of_files(self.config.store, n)

    def stored(self, n: int) -> int:
        """Return the bytes in memory of `n` tokens and their index under sparse attention."""
        if self.config.store is None:
            return 0
        entry_bytes = n * self.sizes.in_memory(self.config.store)
        if not ranks_by_index(n):
            return entry_bytes
        n_rows_allocated = with_room(self.index_rows_in_memory(n))
        return entry_bytes + n_rows_allocated * self.sizes.of_index()

    def means(self, plan: Plan) -> int:
        """Return the bytes in memory of cluster means and page means."""
        return self._cluster_means(plan) + self._page_means(plan)

    def _cluster_means(self, plan: Plan) -> int:
        """Return the bytes of cluster means, which tokens read instead of the other entries."""
        if plan.sparse is None or plan.sparse.residual is None:
            return 0
        return int(plan.n_prompt * self.sizes.of_clusters())

    def _page_means(self, plan: Plan) -> int:
        """Return the bytes of page means, which stay with entries in files if chunks choose by them."""
        reading = plan.sparse_reading
        if reading is None or reading.n_before == plan.n_prompt or not in_files(self.config.store):
            return 0
        return int(self.index_rows_in_memory(plan.n_prompt) * self.sizes.of_means())

    def index_rows_in_memory(self, n: int) -> int:
        """Return for how many of `n` tokens the index and means are in memory: not all with entries in files."""
        return min(n, ENTRIES_IN_MEMORY + ENTRIES_MOVED) if in_files(self.config.store) else n

    def kept(self, plan: Plan) -> int:
        """Return how many of the prompt's entries a token of the answer reads per KV head, in compressed layers."""
        return min(plan.n_prompt, plan.decode_quota.entries)

    def bytes_read(self, plan: Plan) -> int:
        """Return the bytes of entries while the prompt is read, in the layers that can be compressed."""
        reading = plan.sparse_reading
        if reading is not None:
            # Entries go to their store chunk by chunk, from the first chunk that chooses.
            stored = plan.n_prompt * self.sizes.in_memory(self.config.store)
            if self.config.store == "memory":
                return stored
            return stored + reading.n_before * sum(self.sizes.of_token())
        # A cache that evicts while it reads is quantised from the start, others at the compression.
        is_quantised = self.config.evicts_in_blocks
        row_bytes = self.row_bytes if is_quantised else sum(self.sizes.of_token())
        return row_bytes * self.rows_read(plan)

    def rows_read(self, plan: Plan) -> int:
        """Return how many entries the prompt is read with in each layer whose entries the policy chooses."""
        block = 1 if plan.compress is None else plan.compress.policy.block
        n_answer = plan.n_ahead + 1  # answer tokens before the compression
        return min(
            plan.n_prompt + n_answer,
            plan.prefill_quota.entries + max(block, n_answer),
        )


def _grown(n: int, plan: Plan, max_tokens: int) -> int:
    """Return the rows of a cache of `n` entries, spare room included, when an answer of `max_tokens` ends."""
    if plan.keeps_shape:
        return n
    n_new = max_tokens
    if plan.compress is not None and not plan.compress.decode_policy.grows:
        n_new = min(max_tokens, plan.decode_policy.block)  # evicts after each block
    return with_room(n + n_new)
