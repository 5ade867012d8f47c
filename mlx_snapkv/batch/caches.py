"""The caches of one layer for several requests that decode together, and the rule which requests can."""

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
from ..caches.layers import members
from ..compress.evicting import EvictingCache
from ..entries.quantization import (
    Quantised,
    Stored,
    arrays,
    each,
    n_bytes,
    n_rows,
    pack,
    rows,
    rows_to_allocate,
    with_new_rows,
    write,
)
from ..entries.queries import Captured
from ..sparse.cache import SparseKVCache


class BatchCache(ABC):
    """The interface of one layer's cache for a batch of requests. `MlxBatchCache` gives it to mlx-lm's caches.

    Attributes:
        observes: whether queries of later tokens are recorded, for which the attention class is patched.
        chooses: whether the queries of each request choose the entries that a step reads.
        pads: whether a mask hides the padding of requests with fewer entries.
    """

    observes: bool
    chooses: bool
    pads: bool = False

    @property
    def recorded(self) -> Sequence[mx.array]:
        """Return recorded arrays, which are evaluated between two tokens."""
        return ()

    @property
    @abstractmethod
    def kind(self) -> tuple:
        """Return a value that is equal for requests that can decode together."""

    @abstractmethod
    def size(self) -> int:
        """Return the largest number of entries of a request, or of entries that a step reads for a request."""


class MlxBatchCache(BatchCache):
    """Adapter for mlx-lm's batched caches."""

    observes = chooses = False

    def __init__(self, cache: Any):
        """Wrap the cache. Only mlx-lm's `BatchKVCache` pads entries."""
        self._cache = cache
        self.pads = isinstance(cache, BatchKVCache)

    @property
    def kind(self) -> tuple:
        """Return a kind that limits the padding: entries of equal kinds differ in number by less than a factor of 2."""
        return type(self._cache).__name__, self.size().bit_length()

    def size(self) -> int:
        """Return the number of entries, including padding, as mlx-lm counts them."""
        return self._cache.size()


class CompressedBatchCache(BatchCache, _BaseCache):
    """Base class for compressed caches of one layer, one per request, with the interface of mlx-lm's batched caches.

    A step decodes one token of each request.

    Attributes:
        members: the caches of the requests.
        keys: keys that a step reads, to which mlx-lm's pipelines add a dependency.
    """

    keys: Any

    def __init__(self, members: Sequence[Any]):
        """Use the requests' caches, which change with the batch."""
        self.members = list(members)

    @property
    def offset(self) -> mx.array:
        """Return the position of each request's next token, int32 `(B,)`."""
        return mx.array([member.offset for member in self.members], mx.int32)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """Return the mask of the next step; None unless padding must be hidden."""
        assert N == 1 and window_size is None, "a batch of compressed caches takes single tokens"
        return None

    def extend(self, other: Any) -> None:
        """Append the requests of another batch, which must not be used afterwards."""
        self.members += other.members

    def filter(self, keep: Sequence[int]) -> None:
        """Keep the requests with the indices `keep`."""
        self.members = [self.members[i] for i in keep]

    def size(self) -> int:
        """Return the largest number of entries of a request."""
        return max(member.n_entries for member in self.members)

    def empty(self) -> bool:
        """Return False, because requests join after their prompts have been read."""
        return False


class SparseBatchCache(CompressedBatchCache):
    """Sparse caches of several requests. The requests attend one after the other, each to its own entries."""

    chooses = observes = True
    members: list[SparseKVCache]
    keys = keys_property(lambda batch: batch.members[0])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append a token of each request, `(B, n_kv_heads, 1, head_dim)`, and return its keys and values unchanged."""
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
        """Compute the attention of one token of each request; see `SparseKVCache.attend`."""
        outputs: list[mx.array] = []
        for i, member in enumerate(self.members):
            # The dependency makes requests attend one after the other, so that only one needs memory at a time.
            member_queries = mx.depends(queries[i : i + 1], outputs[-1:])
            new_keys = keys[i : i + 1]
            new_values = values[i : i + 1]
            output = member.attend(member_queries, new_keys, new_values, scale, mask, sinks)
            outputs.append(output)
        return mx.concatenate(outputs)

    @property
    def kind(self) -> tuple:
        """Return the same kind for all sparse requests, which share no arrays and may differ in length."""
        return ("chosen",)

    def extract(self, idx: int) -> SparseKVCache:
        """Return a copy of the cache of request `idx`."""
        return copy.deepcopy(self.members[idx])

    @property
    def nbytes(self) -> int:
        """Return the bytes of all requests' caches in memory."""
        return sum(member.nbytes for member in self.members)


class EvictingBatchCache(CompressedBatchCache, Quantised):
    """Evicting caches of several requests, whose entries are in shared arrays.

    The arrays are `(B, n_kv_heads, R, head_dim)`, or those of quantised entries. They have a slot for each request, and
    `R` is the number of rows that the longest request needs. The requests' own caches are empty, but still determine
    the row of the next entry and when to evict. For an eviction, a cache gets its slot back. So each request keeps the
    entries that it would keep alone.
    """

    chooses = False
    values: Any

    def __init__(self, members: Sequence[EvictingCache]):
        """Copy the entries of all requests to shared arrays, and free the originals."""
        super().__init__(members)
        self.quantization = members[0].quantization
        for member in members:
            member.flush()
        self.keys, self.values = _stack([member.keys_and_values() for member in members])
        self._make_room(self._n_needed())
        for member in members:
            member.keys = member.values = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Stored, Stored]:
        """Append an entry of each request, `(B, n_kv_heads, 1, head_dim)`, and return all entries for the attention."""
        for i, member in enumerate(self.members):
            if member.is_due():
                with self._lend_slot(i, write_back=True):
                    member.evict()
        next_rows = [member.place() for member in self.members]
        self._make_room(max(next_rows) + 1)
        entries = pack(keys, self.quantization), pack(values, self.quantization)
        if len(set(next_rows)) == 1:
            write(self._stored, next_rows[0], entries)
        else:  # all requests write to the same row
            index = mx.array(next_rows)[:, None, None, None]
            self.keys, self.values = each(
                lambda held, new: mx.put_along_axis(held, index, new, axis=2), self._stored, entries
            )
        return self.keys_and_values()

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """Return the mask of the next step, bool `(B, 1, 1, rows)`; None if all requests have equally many entries."""
        super().make_mask(N, return_array, window_size)
        counts = [member.n_after_next for member in self.members]
        if len(set(counts)) == 1:
            return None
        is_entry = mx.arange(max(counts)) < mx.array(counts)[:, None]  # (B, rows)
        return is_entry[:, None, None, :]

    def keys_and_values(self) -> tuple[Stored, Stored]:
        """Return the arrays up to the last entry of any request, without unused rows."""
        n = self.size()
        return self._stored if n == n_rows(self.keys) else rows(self._stored, 0, n)

    def record(self, captured: Captured) -> None:
        """Let the cache of each request that observes record its query; see `Recorder.record`."""
        for i, member in enumerate(self.members):
            if member.observes:
                member_queries = captured._replace(queries=captured.queries[i : i + 1])
                with self._lend_slot(i):
                    member.record(member_queries)

    @property
    def waits_for_readers(self) -> bool:  # type: ignore[override]
        """Return whether other layers have yet to read the newest entries of a request."""
        return any(member.waits_for_readers for member in self.members)

    @property
    def observes(self) -> bool:  # type: ignore[override]
        """Return whether a request records queries for evictions during its answer."""
        return any(member.observes for member in self.members)

    @property
    def recorded(self) -> Sequence[mx.array]:
        """Return the recorded arrays of all requests that observe."""
        return [array for member in self.members if member.observes for array in member.recorded]

    @property
    def kind(self) -> tuple:
        """Return a value that is equal for requests that can share arrays and mlx-lm's one mask for all layers."""
        member = self.members[0]
        n_next = member.n_after_next
        is_fixed = n_next == member.n_entries
        # Numbers of equal bit length differ by less than a factor of 2, which limits the padding.
        return is_fixed, n_next.bit_length(), self.quantization

    def extend(self, other: EvictingBatchCache) -> None:
        """Append the requests of another batch, and copy all entries to new arrays."""
        super().extend(other)
        self.keys, self.values = _stack([self._stored, other._stored])

    def filter(self, keep: Sequence[int]) -> None:
        """Keep the requests with the indices `keep`, and drop rows that they do not need."""
        super().filter(keep)
        index = mx.array(list(keep))
        n = self._n_needed()
        self.keys, self.values = each(
            lambda slots: mx.contiguous(mx.take(slots, index, axis=0)[:, :, :n]), self._stored
        )

    def extract(self, idx: int) -> EvictingCache:
        """Return a copy of the cache of request `idx`, with its entries."""
        member = copy.deepcopy(self.members[idx])
        member.keys, member.values = self._copy_entries(idx, member.n_entries)
        return member

    @contextlib.contextmanager
    def _lend_slot(self, i: int, write_back: bool = False) -> Iterator[None]:
        """Move the entries of a request to its own cache, within the `with` block.

        Args:
            i: index of the request.
            write_back: whether the block changes the entries, which are then copied back to the shared arrays.
        """
        member = self.members[i]
        member.keys, member.values = self._copy_entries(i, member.n_entries)
        try:
            yield
            if write_back:
                n = member.n_entries
                self._make_room(n)
                changed = arrays(rows((member.keys, member.values), 0, n))
                for shared, new in zip(arrays(self._stored), changed):
                    shared[i : i + 1, :, :n] = new
        finally:
            member.keys = member.values = None

    def _copy_entries(self, i: int, n: int) -> Stored:
        """Copy the first `n` entries of a request, with a batch axis of 1."""
        return each(lambda slots: mx.contiguous(slots[i : i + 1, :, :n]), self._stored)

    def _n_needed(self) -> int:
        """Return the number of rows that the longest request needs, now or for its next token."""
        return max(max(member.n_entries, member.n_after_next) for member in self.members)

    def _make_room(self, n: int) -> None:
        """Enlarge the arrays to at least `n` rows."""
        n_now = n_rows(self.keys)
        if n > n_now:
            n_added = rows_to_allocate(n) - n_now
            self.keys, self.values = with_new_rows(self._stored, n_added)

    @property
    def _stored(self) -> Stored:
        """Return the keys and values of all slots, including unused rows."""
        return self.keys, self.values

    @property
    def nbytes(self) -> int:
        """Return the bytes of the shared arrays, including unused rows."""
        return n_bytes(self._stored)


def _stack(slots: list[Stored]) -> Stored:
    """Concatenate slots along the batch axis. Shorter slots are padded."""
    n = max(map(n_rows, slots))
    padded = []
    for slot in slots:
        n_missing = n - n_rows(slot)
        padded.append(with_new_rows(slot, n_missing) if n_missing else slot)
    return each(lambda *parts: mx.concatenate(list(parts)), *padded)


def batch_caches(prompt_cache: list) -> list[BatchCache]:
    """Return the caches of all layers as batches of one request."""
    caches = members(prompt_cache)
    return [cache if isinstance(cache, BatchCache) else MlxBatchCache(cache) for cache in caches]


def kind_of(prompt_cache: list) -> tuple:
    """Return the kinds of a request's caches. Requests with equal kinds can decode together."""
    caches = batch_caches(prompt_cache)
    has_choosing = any(cache.chooses for cache in caches)
    has_padded = any(cache.pads for cache in caches)
    # mlx-lm makes one mask for all layers. If layers of a sparse request read all entries, they would need their own
    # mask, so such a request decodes alone: the identity of its first cache makes its kind unique.
    own_identity = id(prompt_cache[0]) if has_choosing and has_padded else None
    return own_identity, *(cache.kind for cache in caches)


def batch_of_one(cache: Any) -> Any:
    """Return the cache of one layer as a batch of one request."""
    if isinstance(cache, CacheList):
        return CacheList(*map(batch_of_one, cache.caches))
    layer = layer_cache(cache)
    if layer.stacks:
        return EvictingBatchCache([cache])
    if layer.chooses:
        return SparseBatchCache([cache])
    return cache.merge([cache])
