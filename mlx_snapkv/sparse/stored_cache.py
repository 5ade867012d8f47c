"""The KV cache that keeps all entries. Between turns, they are in a store."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, _BaseCache, create_attention_mask

from ..caches.adapter import full_cache
from ..caches.contract import LayerCache, keys_property, loadable
from ..entries.entries import Entries
from ..entries.quantization import concatenate_rows, count_bytes, count_rows
from ..entries.queries import Recorder
from ..errors import Missing
from .clusters import CompleteBlocks
from .index import KeyIndex
from .options import PAGE_SIZE
from .page_means import PageMeans
from .stores import MemoryStore, Store

_FILES_MISSING = (
    "this cache came from a file without the entries beside it: load it with mlx_snapkv's saved.load or "
    "Conversation.load"
)


@loadable
class StoredKVCache(Recorder, LayerCache, _BaseCache):
    """A KV cache that keeps all of a layer's entries, and records the post-RoPE queries that `observe` asks for.

    A plain in-memory store always has all entries. With any other store, a chunk's entries move to the store before the
    next chunk is read, and the last ones at the end of the prompt. With sparse prefill, entries stay in memory until a
    chunk first chooses. With full attention, each `update_and_fetch` reads all entries from the store and dequantises
    them, so that only one layer has plain copies in memory at a time.

    If entries are in files, mlx-lm's `save_prompt_cache` writes only the index, without its codes, and the first entry,
    which records shapes and dtypes. `saved.book` saves the files next to the prompt cache, and opens them when the
    cache is loaded.

    Args:
        layer: the cache's `AttentionLayer`.
        store: keeps entries between turns. None means plain memory.

    Attributes:
        growing: entries since the last `offload`, or all entries if the store is plain memory.
        page_means: mean keys of the first pages. Empty unless entries are in files.
        clusters: clusters of earlier turns' entries.
        index: index of earlier turns' keys, or None if there were too few keys.
    """

    grows = True
    store: Store
    page_means: PageMeans
    clusters: CompleteBlocks | None
    index: KeyIndex | None = None
    growing: KVCache
    keys = keys_property(attrgetter("growing"))

    def __init__(self, layer: Any = None, store: Store | None = None):
        """Start with the store's entries, if there are any. No queries are recorded before `observe`."""
        super().__init__(first=0, last=0)
        self.layer = layer
        self.store = store or MemoryStore()
        self.page_means = PageMeans()
        self.clusters = None
        is_plain_memory = type(self.store.cache) is KVCache
        self.growing = self.store.cache if is_plain_memory else KVCache()

    def observe(self, first: int, last: int, capacity: int) -> None:
        """Prepare for a prompt: drop recorded queries, and record new ones at positions `[first, last)`.

        The next append allocates rows for all positions before `capacity`, so that prefill never reallocates the
        buffers. Later appends allocate as few as mlx-lm's cache does.
        """
        self.start_recording(first, last)
        self.growing.step = max(KVCache.step, capacity - self.offset)

    @property
    def _n_stored(self) -> int:
        """Return the number of entries in the store that are not in `growing`."""
        return 0 if self._grows_in_store else self.store.n_entries

    @property
    def _grows_in_store(self) -> bool:
        """Return whether the store is plain memory, so that all of its entries are in `growing`."""
        return self.growing is self.store.cache

    @property
    def offset(self) -> int:  # type: ignore[override]
        """Return the number of tokens read."""
        return self._n_stored + self.growing.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values `(B, n_kv_heads, L, head_dim)`, and return the keys and values of all entries."""
        entries_are_read_from_store = self._n_stored > 0
        if entries_are_read_from_store:
            # This also evaluates the previous layer's attention, so that the previous layer's entries can be freed
            # before this layer's entries are read.
            mx.eval(keys, values)
        self._append_to_growing(keys, values)
        return self.keys_and_values()

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Append keys and values, after moving earlier entries from `growing` to the store."""
        self.offload()
        self._append_to_growing(keys, values)

    def _append_to_growing(self, keys: mx.array, values: mx.array) -> None:
        """Append keys and values to `growing`. After the first reallocation, allocate in mlx-lm's steps again."""
        n_rows_before = count_rows(self.growing.keys) if self.growing.keys is not None else 0
        self.growing.update_and_fetch(keys, values)
        if count_rows(self.growing.keys) > n_rows_before:
            self.growing.step = KVCache.step

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the keys and values of all entries. Keys are evaluated before values to save memory."""
        if self._n_stored == 0:
            return self.growing.keys_and_values()
        keys, values = self.store.entries()
        if self.growing.offset > 0:
            keys, values = concatenate_rows((keys, values), self.growing.keys_and_values())
        mx.eval(keys)
        mx.eval(values)
        return keys, values

    def held(self) -> Entries:
        """Return all entries, with the recorded queries as voters."""
        keys, values = self.keys_and_values()
        return Entries(keys, values, self.recorded_voters(keys.shape), layer=self.layer)

    def stored_entries(self) -> Entries:
        """Move all entries to the store, and return them as stored."""
        self.offload()
        return self.store.all_entries()

    def cache_to_save(self) -> Any:
        """Return this cache if entries are in files, otherwise an mlx-lm cache with all entries."""
        self.offload()
        if self.in_files:
            return self
        return full_cache(self.store.all_entries(), self.sparse_from)

    def append_sparsely_computed(self, keys: mx.array, values: mx.array) -> None:
        """Append keys and values of tokens that were computed with sparse attention."""
        if self.sparse_from is None:
            self.sparse_from = self.offset
        self._append_to_growing(keys, values)

    def offload(self) -> None:
        """Move all entries to the store.

        Raises: SnapKVError: the store can't be written. Entries then stay in memory.
        """
        if not self._grows_in_store and self.growing.offset > 0:
            self.store.append(Entries(*self.growing.keys_and_values()))
            self.growing = KVCache()

    def nonempty_stores(self) -> list[Store]:
        """Return the store and a store that wraps `growing`, in order of position. Empty stores are left out."""
        stores: list[Store] = []
        if self._n_stored > 0:
            stores.append(self.store)
        if self.growing.offset > 0:
            stores.append(MemoryStore(cache=self.growing))
        return stores

    def fill(self, entries: Entries) -> None:
        """Fill this cache, which must be empty, with `entries`."""
        if self._grows_in_store:
            self.growing.keys, self.growing.values = entries.dequantized()
            self.growing.offset = len(entries)
        else:
            self.store.append(entries)

    def restorer(self) -> Callable[[], None]:
        """Return a function that restores the current entries and index. It can be called more than once."""
        trim_new_tokens = super().restorer()
        n_stored_before = self._n_stored
        growing_before = copy.copy(self.growing)
        index_before = self.index

        def restore() -> None:
            was_offloaded = self._n_stored > n_stored_before
            self.index = index_before  # a turn may have replaced the index
            trim_new_tokens()
            if was_offloaded:  # restore plain entries, because the store may have quantised them
                self.store.truncate(n_stored_before)
                self.growing = copy.copy(growing_before)

        return restore

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """Return mlx-lm's causal mask over all entries."""
        return create_attention_mask(N, self.offset, return_array, window_size)

    def size(self) -> int:
        """Return the number of entries, one per token."""
        return self.offset

    def empty(self) -> bool:
        """Return whether the cache is empty."""
        return self.offset == 0

    def is_trimmable(self) -> bool:
        """Return True, because entries are only ever appended."""
        return True

    def trim(self, n: int) -> int:
        """Drop the `n` newest tokens, or all if there are fewer. Return the number dropped."""
        n = min(self.offset, n)
        n_trimmed_from_memory = self.growing.trim(n)
        n_to_trim_from_store = n - n_trimmed_from_memory
        if n_to_trim_from_store > 0:
            self.store.truncate(self._n_stored - n_to_trim_from_store)
        if self.index is not None:
            self.index.codes.truncate(self.offset)
        self.page_means.truncate(self.offset // PAGE_SIZE)
        if self.clusters is not None:
            self.clusters = self.clusters.within_first(self.offset)
        if self.sparse_from is not None and self.offset <= self.sparse_from:
            self.sparse_from = None
        return n

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Return the size in bytes of the entries in memory. The index and the means are not counted."""
        return sum(store.nbytes for store in self.nonempty_stores())

    @property
    def full_nbytes(self) -> int:
        """Return the size in bytes of a full, unquantised cache of the same tokens."""
        if self.offset == 0:
            return 0
        first_store, *_ = self.nonempty_stores()
        first_entry = first_store.entries(0, 1)
        return self.offset * count_bytes(first_entry)

    @property
    def file_nbytes(self) -> int:  # type: ignore[override]
        """Return the size in bytes of entries, codes and page means in files."""
        code_nbytes = 0 if self.index is None else self.index.codes.spilled_nbytes
        return self.store.file_nbytes + code_nbytes + self.page_means.file_nbytes

    @property
    def kv_nbytes(self) -> int:
        """Return the size in bytes of the entries, index, page means and clusters that are in memory."""
        cluster_nbytes = 0 if self.clusters is None else self.clusters.nbytes
        return self.nbytes + self.index_nbytes + self.page_means.nbytes + cluster_nbytes

    @property
    def index_nbytes(self) -> int:
        """Return the size in bytes of the index in memory, or 0 without an index."""
        return 0 if self.index is None else self.index.codes.nbytes

    @property
    def sample_entries(self) -> tuple[mx.array, mx.array]:
        """Return the first entry if entries are in files, otherwise the entries in `growing`."""
        return self.store.first_entry or self.growing.keys_and_values()

    def validate(self) -> str | None:
        """Return None, because files are checked when they are opened and read."""
        return None

    @property
    def state(self) -> tuple:
        """Return the cache's arrays.

        If the entries are in files and no request is running, return only the arrays that a saved prompt cache needs.
        """
        first_entry = None if self.growing.offset > 0 else self.store.first_entry
        if first_entry is not None:  # between requests
            index_state = None if self.index is None else self.index.state
            return *first_entry, index_state
        # Include the queries, because mlx-lm's prefill loop evaluates the state.
        return self.growing.keys, self.growing.values, self._queries, self.moments.sums

    @state.setter
    def state(self, state: Sequence) -> None:
        first_key, first_value, index_state = state
        first_entry = (first_key, first_value)
        # Until the files are opened, any use of this store raises an error that says how to load them.
        store: Any = Missing(_FILES_MISSING, cache=None, in_files=True, first_entry=first_entry)
        self.__init__(store=store)  # type: ignore[misc]
        self.index = None
        if index_state is not None:
            self.index = KeyIndex.from_state(index_state, first_key)
