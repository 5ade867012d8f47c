"""Batched caches for requests that decode together, and the rule for which requests can."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, CacheList, _BaseCache

from ..caches.adapter import layer_cache
from ..caches.contract import keys_property
from ..caches.layers import all_caches
from ..compress.evicting import EvictingCache
from ..entries.quantization import (
    Quantised,
    Stored,
    count_bytes,
    count_rows,
    flat_arrays,
    map_arrays,
    pack,
    rows_to_allocate,
    slice_rows,
    with_new_rows,
    write_rows,
)
from ..entries.queries import CapturedQueries
from ..sparse.cache import SparseKVCache


class BatchCache(ABC):
    """Interface for one layer's cache in a batch of requests. `MlxBatchCache` adapts mlx-lm's own caches to it.

    Attributes:
        observes: whether queries of upcoming tokens are recorded, which requires patching the attention class.
        chooses: whether each request's queries choose the entries that a step reads.
        pads: whether shorter requests are padded, and a mask hides the padding.
    """

    observes: bool
    chooses: bool
    pads: bool = False

    @property
    def recorded(self) -> Sequence[mx.array]:
        """Return recorded arrays that have to be evaluated between tokens."""
        return ()

    @property
    @abstractmethod
    def kind(self) -> tuple:
        """Return a tuple that is equal for requests that can decode together."""

    @abstractmethod
    def size(self) -> int:
        """Return the length of the longest request. If requests choose, count only the entries that a step reads."""


class MlxBatchCache(BatchCache):
    """Adapts one of mlx-lm's batched caches."""

    observes = chooses = False

    def __init__(self, cache: Any):
        """Wrap the cache. Of mlx-lm's caches, only `BatchKVCache` uses padding."""
        self._cache = cache
        self.pads = isinstance(cache, BatchKVCache)

    @property
    def kind(self) -> tuple:
        """Return a kind that limits padding: caches of the same kind differ in length by less than a factor of 2."""
        return type(self._cache).__name__, self.size().bit_length()

    def size(self) -> int:
        """Return the number of entries, including padding, as mlx-lm counts them."""
        return self._cache.size()


class CompressedBatchCache(BatchCache, _BaseCache):
    """Base class for one layer's compressed caches, one per request, with the interface of mlx-lm's batched caches.

    Each step decodes one token per request.

    Attributes:
        members: the requests' caches.
        keys: keys that a step reads. mlx-lm's pipelines add a dependency to them.
    """

    keys: Any

    def __init__(self, members: Sequence[Any]):
        """Take over the requests' caches, which will change with the batch."""
        self.members = list(members)

    @property
    def offset(self) -> mx.array:
        """Return the position of each request's next token, int32 `(B,)`."""
        return mx.array([member.offset for member in self.members], mx.int32)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """Return the mask for the next step, or None if there is no padding."""
        assert N == 1 and window_size is None, "a batch of compressed caches takes single tokens"
        return None

    def extend(self, other: Any) -> None:
        """Append the requests of another batch, which must not be used any more."""
        self.members += other.members

    def filter(self, keep: Sequence[int]) -> None:
        """Keep only the requests at the indices `keep`."""
        self.members = [self.members[i] for i in keep]

    def size(self) -> int:
        """Return the number of entries in the longest request."""
        return max(member.n_entries for member in self.members)

    def empty(self) -> bool:
        """Return False, because requests only join after prefill."""
        return False


class SparseBatchCache(CompressedBatchCache):
    """Sparse caches of several requests. Requests attend one after another, each to its own entries."""

    chooses = observes = True
    members: list[SparseKVCache]
    keys = keys_property(lambda batch: batch.members[0])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append one token per request, `(B, n_kv_heads, 1, head_dim)`, and return the keys and values unchanged."""
        for i, member in enumerate(self.members):
            member.update_and_fetch(keys[i : i + 1], values[i : i + 1])
        return keys, values

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: None,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Compute attention for one token per request; see `SparseKVCache.attend`."""
        outputs: list[mx.array] = []
        for i, member in enumerate(self.members):
            # Depend on the previous request's output, so that only one request at a time takes memory.
            member_queries = mx.depends(queries[i : i + 1], outputs[-1:])
            new_keys = keys[i : i + 1]
            new_values = values[i : i + 1]
            output = member.attend(member_queries, new_keys, new_values, scale, mask, sinks)
            outputs.append(output)
        return mx.concatenate(outputs)

    @property
    def kind(self) -> tuple:
        """Return the same kind for all sparse requests. They share no arrays, so their lengths may differ."""
        return ("chosen",)

    def extract(self, idx: int) -> SparseKVCache:
        """Return a copy of the cache of the request at index `idx`."""
        return copy.deepcopy(self.members[idx])

    @property
    def nbytes(self) -> int:
        """Return the memory that all requests' caches take."""
        return sum(member.nbytes for member in self.members)


class EvictingBatchCache(CompressedBatchCache, Quantised):
    """Evicting caches of several requests, with all entries in shared arrays.

    The arrays have shape `(B, n_kv_heads, R, head_dim)`, or the equivalent for quantised entries. Each request has a
    slot on the batch axis, and `R` is the number of rows that the longest request needs. The requests' own caches are
    empty, but still decide where the next entry goes and when to evict. To evict, a cache temporarily gets its entries
    back. Each request therefore keeps exactly the entries that it would keep outside the batch.
    """

    chooses = False
    values: Any

    def __init__(self, members: Sequence[EvictingCache]):
        """Copy all requests' entries to shared arrays, and free the originals."""
        super().__init__(members)
        self.quantization = members[0].quantization
        for member in members:
            member.compact()
        self.keys, self.values = _stack([member.keys_and_values() for member in members])
        self._make_room(self._n_needed())
        for member in members:
            member.keys = member.values = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Stored, Stored]:
        """Append one entry per request, `(B, n_kv_heads, 1, head_dim)`, and return all entries for attention."""
        for i, member in enumerate(self.members):
            if member.must_evict():
                with self._lend_slot(i, write_back=True):
                    member.evict()
        next_rows = [member.claim_row() for member in self.members]
        self._make_room(max(next_rows) + 1)
        entries = pack(keys, self.quantization), pack(values, self.quantization)
        if len(set(next_rows)) == 1:
            write_rows(self._stored, next_rows[0], entries)
        else:  # all requests write to the same row
            index = mx.array(next_rows)[:, None, None, None]
            self.keys, self.values = map_arrays(
                lambda held, new: mx.put_along_axis(held, index, new, axis=2), self._stored, entries
            )
        return self.keys_and_values()

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """Return a bool mask `(B, 1, 1, rows)` for the next step, or None if all requests have the same length."""
        super().make_mask(N, return_array, window_size)
        counts = [member.n_after_next for member in self.members]
        if len(set(counts)) == 1:
            return None
        is_entry = mx.arange(max(counts)) < mx.array(counts)[:, None]  # (B, rows)
        return is_entry[:, None, None, :]

    def keys_and_values(self) -> tuple[Stored, Stored]:
        """Return the arrays without the rows that no request uses."""
        n = self.size()
        return self._stored if n == count_rows(self.keys) else slice_rows(self._stored, 0, n)

    def record(self, captured: CapturedQueries) -> None:
        """Pass each request's query to its cache if the cache observes; see `Recorder.record`."""
        for i, member in enumerate(self.members):
            if member.observes:
                member_queries = captured._replace(queries=captured.queries[i : i + 1])
                with self._lend_slot(i):
                    member.record(member_queries)

    @property
    def waits_for_readers(self) -> bool:  # type: ignore[override]
        """Return whether other layers still have to read a request's newest entries."""
        return any(member.waits_for_readers for member in self.members)

    @property
    def observes(self) -> bool:  # type: ignore[override]
        """Return whether any request records queries for evictions during decoding."""
        return any(member.observes for member in self.members)

    @property
    def recorded(self) -> Sequence[mx.array]:
        """Return the arrays recorded by all requests that observe."""
        return [array for member in self.members if member.observes for array in member.recorded]

    @property
    def kind(self) -> tuple:
        """Return a kind such that requests of equal kinds can share arrays and mlx-lm's single mask."""
        member = self.members[0]
        n_next = member.n_after_next
        is_fixed = n_next == member.n_entries
        # Lengths with the same bit length differ by less than a factor of 2, which limits padding.
        return is_fixed, n_next.bit_length(), self.quantization

    def extend(self, other: EvictingBatchCache) -> None:
        """Append the requests of another batch by copying all entries to new arrays."""
        super().extend(other)
        self.keys, self.values = _stack([self._stored, other._stored])

    def filter(self, keep: Sequence[int]) -> None:
        """Keep only the requests at the indices `keep`, and drop rows that none of them needs."""
        super().filter(keep)
        index = mx.array(list(keep))
        n = self._n_needed()
        self.keys, self.values = map_arrays(
            lambda slots: mx.contiguous(mx.take(slots, index, axis=0)[:, :, :n]), self._stored
        )

    def extract(self, idx: int) -> EvictingCache:
        """Return a copy of the cache of the request at index `idx`, including its entries."""
        member = copy.deepcopy(self.members[idx])
        member.keys, member.values = self._copy_entries(idx, member.n_entries)
        return member

    @contextlib.contextmanager
    def _lend_slot(self, i: int, write_back: bool = False) -> Iterator[None]:
        """Give a request's cache its entries back within the `with` block.

        Args:
            i: index of the request.
            write_back: whether to copy the entries back to the shared arrays after the block.
        """
        member = self.members[i]
        member.keys, member.values = self._copy_entries(i, member.n_entries)
        try:
            yield
            if write_back:
                n = member.n_entries
                self._make_room(n)
                changed = flat_arrays(slice_rows((member.keys, member.values), 0, n))
                for shared, new in zip(flat_arrays(self._stored), changed):
                    shared[i : i + 1, :, :n] = new
        finally:
            member.keys = member.values = None

    def _copy_entries(self, i: int, n: int) -> Stored:
        """Copy a request's first `n` entries, keeping a batch axis of 1."""
        return map_arrays(lambda slots: mx.contiguous(slots[i : i + 1, :, :n]), self._stored)

    def _n_needed(self) -> int:
        """Return how many rows the longest request needs now or for its next token."""
        return max(max(member.n_entries, member.n_after_next) for member in self.members)

    def _make_room(self, n: int) -> None:
        """Enlarge the arrays to at least `n` rows."""
        n_now = count_rows(self.keys)
        if n > n_now:
            n_added = rows_to_allocate(n) - n_now
            self.keys, self.values = with_new_rows(self._stored, n_added)

    @property
    def _stored(self) -> Stored:
        """Return all keys and values, including unused rows."""
        return self.keys, self.values

    @property
    def nbytes(self) -> int:
        """Return the size of the shared arrays in bytes, including unused rows."""
        return count_bytes(self._stored)


def _stack(slots: list[Stored]) -> Stored:
    """Concatenate arrays along the batch axis, padding shorter ones."""
    n = max(map(count_rows, slots))
    padded = []
    for slot in slots:
        n_missing = n - count_rows(slot)
        padded.append(with_new_rows(slot, n_missing) if n_missing else slot)
    return map_arrays(lambda *parts: mx.concatenate(list(parts)), *padded)


def batch_caches(prompt_cache: list) -> list[BatchCache]:
    """Return every layer's cache as a `BatchCache`, wrapping mlx-lm's own caches."""
    caches = all_caches(prompt_cache)
    return [cache if isinstance(cache, BatchCache) else MlxBatchCache(cache) for cache in caches]


def kind_of(prompt_cache: list) -> tuple:
    """Return the kinds of a request's caches. Requests with equal kinds can decode together."""
    caches = batch_caches(prompt_cache)
    has_choosing = any(cache.chooses for cache in caches)
    has_padded = any(cache.pads for cache in caches)
    # mlx-lm computes one mask for all layers. If some layers of a sparse request read all entries, they would need a
    # different mask, so the request has to decode alone. The id of its first cache makes its kind unique.
    own_identity = id(prompt_cache[0]) if has_choosing and has_padded else None
    return own_identity, *(cache.kind for cache in caches)


def batch_of_one(cache: Any) -> Any:
    """Convert one layer's cache to a batch of one request."""
    if isinstance(cache, CacheList):
        return CacheList(*map(batch_of_one, cache.caches))
    layer = layer_cache(cache)
    if layer.stacks:
        return EvictingBatchCache([cache])
    if layer.chooses:
        return SparseBatchCache([cache])
    return cache.merge([cache])
