"""Estimating the bytes that a request will take in memory and on disk."""

import contextlib
import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, cast

from mlx.utils import tree_flatten
from mlx_lm.generate import DEFAULT_QUANTIZED_KV_START
from mlx_lm.models.cache import KVCache

from ..caches.adapter import has_all_entries
from ..caches.layers import AttentionLayer, attention_layers, members, token_caches
from ..entries.attention import ONE_PASS_BYTES
from ..entries.quantization import Quantization, n_bytes, pack, with_room
from ..errors import UnsupportedModelError
from ..sparse.clusters import CLUSTER_SIZE
from ..sparse.held_rows import ENTRIES_IN_MEMORY, ENTRIES_MOVED
from ..sparse.index import index_bytes, ranks_by_index
from ..sparse.options import PAGE_SIZE
from ..sparse.page_means import means_quantization
from ..sparse.prompt_caches import in_files, store_quantization
from .config import CompressionConfig
from .prompt_plan import PREFILL_STEP_SIZE
from .request_plan import Plan, plan_request
from .scores import scores_limit
from .shapes import LayerShape, layer_shapes, window_of
from .units import format_bytes

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


class EntrySizes:
    """Bytes of a token's entries in a model's caches, from the shapes of caches that hold one token.

    Nothing is computed for the shapes.

    Attributes:
        layers: the layers whose entries can be compressed; if there are none, `refusal` says why.
        plain: for each full cache of another layer, the bytes of a token's entries.
        sliding: for each sliding window, the bytes of a token's entries, and the tokens that it holds.
        states: bytes of all linear states.
    """

    def __init__(self, model):
        self.model = model
        self.caches = token_caches(model)
        self.layers: list[AttentionLayer] = []
        self.refusal: UnsupportedModelError | None = None
        try:
            self.layers = attention_layers(model, self.caches)
        except UnsupportedModelError as error:
            self.refusal = error
        compressed = [layer.cache_in(self.caches) for layer in self.layers]
        self._entries = [cache.keys_and_values() for cache in compressed]
        mine = {id(cache) for cache in compressed}
        others = [c for c in members(self.caches) if id(c) not in mine and not c.empty()]
        windows = [c for c in others if window_of(c) is not None]
        plain = [c for c in others if has_all_entries(c) and window_of(c) is None]
        self.plain = [n_bytes(cache.keys_and_values()) for cache in plain]
        self.sliding = [(c.nbytes // c.keys.shape[2], window_of(c) or 0) for c in windows]
        self.states = sum(c.nbytes for c in others if c not in plain and c not in windows)

    @cached_property
    def shapes(self) -> set[LayerShape]:
        """Return the distinct shapes of the model's layers."""
        return layer_shapes(self.model, self.caches)

    @property
    def of_widest(self) -> int:
        """Return the bytes of a token's entries in the layer with the largest."""
        return max((*self.of_token(), *self.plain), default=0)

    def of_token(self, quantization: Quantization | None = None) -> list[int]:
        """Return the bytes of a token's entries in each of `layers`, quantised if asked."""
        return [n_bytes([pack(x, quantization) for x in entries]) for entries in self._entries]

    def in_memory(self, store: str | None) -> int:
        """Return the bytes of a token's entries that a `store` keeps in memory, without an index."""
        return 0 if in_files(store) else self.stored(store)

    def stored(self, store: str | None) -> int:
        """Return the bytes of a token's entries in a `store`, in memory or files."""
        return sum(self.of_token(store_quantization(self.model, self.layers, store)))

    def of_files(self, store: str | None, n: int) -> int:
        """Return the bytes of `n` tokens in files: entries, and for a long text also the index and means."""
        if not in_files(store):
            return 0
        stored = n * self.stored(store)
        return stored + (
            int(n * (self.of_index() + self.of_means())) if n > ENTRIES_IN_MEMORY else 0
        )

    def of_index(self) -> int:
        """Return the bytes of a token in the key indexes of `layers`."""
        return sum(index_bytes(keys) for keys, _ in self._entries)

    def of_means(self) -> float:
        """Return the bytes of a token in the mean keys by which chunks choose pages."""
        means = (pack(keys, means_quantization(keys.shape[-1])) for keys, _ in self._entries)
        return n_bytes(list(means)) / PAGE_SIZE

    def of_clusters(self) -> float:
        """Return the bytes of a token in the clusters of unread entries: its id, and its part of the means."""
        ids = sum(2 * keys.shape[1] for keys, _ in self._entries)
        return ids + sum(self.of_token()) / CLUSTER_SIZE

    def full(self, quantization: Quantization | None) -> int:
        """Return the bytes of a token's entries in all full caches; mlx-lm quantises caches outside a `CacheList`."""
        alone = [c for c in self.caches if isinstance(c, KVCache) and not c.empty()]
        stored = [c.keys_and_values() for c in alone if quantization is not None]
        saved = n_bytes(stored) - n_bytes([pack(x, quantization) for kv in stored for x in kv])
        return sum(self.of_token()) + sum(self.plain) - saved

    def rest(self, n: int, chunk: int) -> int:
        """Return the bytes of linear states and sliding windows after `n` tokens, read `chunk` at a time."""
        return self.states + sum(size * min(n, most + chunk) for size, most in self.sliding)


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
        sizes, n_prompt = self.sizes, plan.n_prompt
        whole = n_prompt + max_tokens + KVCache.step  # by which full caches grow
        rest, plain = sizes.rest(whole, self.step_size), sum(sizes.plain)
        chosen = self.kept(plan)
        kept = self.row_bytes * chosen
        held = self.row_bytes * _grown(chosen, plan, max_tokens)
        stored = self.stored(n_prompt + max_tokens)
        # Entries of a sparsely read prompt are in their store before the answer's first token.
        gone = plan.sparse_reading is not None and self.config.store != "memory"
        reading = max(0, self.bytes_read(plan) + kept * (not gone) - held)
        return Need(
            reading=reading,
            kept=kept + n_prompt * plain,
            held=held + whole * plain + rest,
            fixed=plan.keeps_shape and not sizes.plain,
            stays=stored + self.means(plan) if self.config.sparse is not None else 0,
            chunk=self._chunk(plan),
            step=int(MARGIN * sizes.of_widest * (n_prompt if sizes.plain else chosen)),
        )

    def _need_of_full(self, plan: Plan, max_tokens: int) -> Need:
        """Return the bytes of a request whose prompt is left to mlx-lm."""
        sizes, n_prompt = self.sizes, plan.n_prompt
        whole = n_prompt + max_tokens + KVCache.step  # by which full caches grow
        is_quantised = self.quantises_full and n_prompt > DEFAULT_QUANTIZED_KV_START
        size = sizes.full(self.quantization if is_quantised else None)
        held = whole * size + sizes.rest(whole, self.step_size)
        plain = min(n_prompt, DEFAULT_QUANTIZED_KV_START + self.step_size) * sizes.full(None)
        chunk = min(n_prompt, self.step_size)
        copied = int(MARGIN * sizes.of_widest * n_prompt)  # a cache that grows is copied
        return Need(
            reading=max(0, plain - held) if is_quantised else 0,
            kept=n_prompt * size,
            held=held,
            chunk=max(x.held(chunk, n_prompt, margin=MARGIN) for x in sizes.shapes) + copied,
            step=copied,
        )

    def _chunk(self, plan: Plan) -> int:
        """Return the bytes that a chunk holds beside entries: activations, scores, and a copy of a layer's entries."""
        sizes, n, reading = self.sizes, plan.n_prompt, plan.sparse_reading
        chunk, seen, means = min(n, plan.chunk_size(self.step_size)), self.rows_read(plan), 0
        if reading is not None:
            seen = min(n, max(reading.reach.most, reading.last.most)) + chunk
            means = int(sizes.of_means() * self.with_rows(n))
        limit = None if plan.options.evicts_in_blocks else scores_limit()
        most = n if sizes.plain else seen
        held = max(x.held(chunk, most, limit, MARGIN) for x in sizes.shapes)
        received = ONE_PASS_BYTES if plan.accumulates_attention else 0
        return held + int(MARGIN * (sizes.of_widest * seen + means)) + received

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
        indexed = with_room(self.with_rows(n)) if ranks_by_index(n) else 0
        return n * self.sizes.in_memory(self.config.store) + indexed * self.sizes.of_index()

    def means(self, plan: Plan) -> int:
        """Return the bytes in memory of cluster means and page means."""
        return self._of_rest(plan) + self._of_pages(plan)

    def _of_rest(self, plan: Plan) -> int:
        weighs = plan.sparse is not None and plan.sparse.residual is not None
        return int(plan.n_prompt * self.sizes.of_clusters()) if weighs else 0

    def _of_pages(self, plan: Plan) -> int:
        """Return the bytes of page means, which stay with entries in files if chunks choose by them."""
        reading = plan.sparse_reading
        if reading is None or reading.n_before == plan.n_prompt or not in_files(self.config.store):
            return 0
        return int(self.with_rows(plan.n_prompt) * self.sizes.of_means())

    def with_rows(self, n: int) -> int:
        """Return for how many of `n` tokens the index and means are in memory: not all with entries in files."""
        return min(n, ENTRIES_IN_MEMORY + ENTRIES_MOVED) if in_files(self.config.store) else n

    def kept(self, plan: Plan) -> int:
        """Return how many entries the answer is decoded from in each layer whose entries the policy chooses."""
        return min(plan.n_prompt, plan.decode_quota.entries)

    def bytes_read(self, plan: Plan) -> int:
        """Return the bytes of entries while the prompt is read, in the layers that can be compressed."""
        reading = plan.sparse_reading
        if reading is not None:
            # Entries go to their store chunk by chunk, from the first chunk that chooses.
            stay = plan.n_prompt * self.sizes.in_memory(self.config.store)
            if self.config.store == "memory":
                return stay
            return stay + reading.n_before * sum(self.sizes.of_token())
        size = self.row_bytes if self.config.evicts_in_blocks else sum(self.sizes.of_token())
        return size * self.rows_read(plan)

    def rows_read(self, plan: Plan) -> int:
        """Return how many entries the prompt is read with in each layer whose entries the policy chooses."""
        block = 1 if plan.compress is None else plan.compress.policy.block
        more = max(block, plan.n_ahead + 1)
        return min(plan.n_prompt + plan.n_ahead + 1, plan.prefill_quota.entries + more)


def weight_bytes(model) -> int:
    return sum(x.nbytes for _, x in cast(list, tree_flatten(model.parameters())))


def _grown(n: int, plan: Plan, max_tokens: int) -> int:
    """Return the rows of a cache of `n` entries when an answer of `max_tokens` ends."""
    if plan.keeps_shape:
        return n
    evicts = plan.compress is not None and not plan.compress.decode_policy.grows
    return with_room(n + (min(max_tokens, plan.decode_policy.block) if evicts else max_tokens))


class Disk(NamedTuple):
    """A disk that entries are written to: `each` bytes into each of its `folders`; `free` bytes are free."""

    folders: tuple[Path, ...]
    each: int
    free: int

    @property
    def need(self) -> int:
        return self.each * len(self.folders)


@dataclass(frozen=True)
class FileCost:
    """The bytes that reading a prompt will write to files."""

    tokens: int
    disks: tuple[Disk, ...]

    def __str__(self) -> str:
        where = " and ".join(
            " and ".join(f"{format_bytes(disk.each)} in {folder}" for folder in disk.folders)
            + f" ({format_bytes(disk.free)} free)"
            for disk in self.disks
        )
        return f"reading {self.tokens:,} tokens will write at most {where}"

    @property
    def warnings(self) -> list[str]:
        return [
            f"{disk.folders[0]} does not have enough room: {format_bytes(disk.need)} will be written and "
            f"{format_bytes(disk.free)} is free; set --store-dir to another folder, "
            "or give a shorter text"
            for disk in self.disks
            if disk.need > disk.free
        ]


def file_cost(
    model,
    store: str | None,
    n_new: int,
    *,
    folder: str | None = None,
    saved_in: Path | None = None,
) -> FileCost | None:
    """Return the bytes that reading `n_new` tokens will write; None if entries don't go to files.

    Args:
        folder: the folder for temporary files; None is TMPDIR.
        saved_in: the folder that all entries are copied to at the end.
    """
    if n_new == 0 or not in_files(store):
        return None
    stored = EntrySizes(model).of_files(store, n_new)
    disks: dict[int, Disk] = {}
    for place in filter(None, (Path(folder or tempfile.gettempdir()), saved_in)):
        with contextlib.suppress(OSError):  # some file systems don't say what is free
            device = place.stat().st_dev
            before = disks.get(device) or Disk((), stored, shutil.disk_usage(place).free)
            disks[device] = before._replace(folders=(*before.folders, place))
    return FileCost(n_new, tuple(disks.values())) if disks else None
