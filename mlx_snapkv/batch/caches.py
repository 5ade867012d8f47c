"""Batched caches, and the rule for which requests can decode together."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, _BaseCache

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


class CompressedBatchCache(_BaseCache, ABC):
    """Base class for one layer's cache in a batch. It contains one compressed cache per request.

    It has the interface of mlx-lm's batched caches. Each step decodes one token per request.

    Attributes:
        request_caches: the requests' caches.
        keys: keys that the next step reads. In a pipeline, mlx-lm makes the last layer's keys depend on the hidden
            states sent to the next process, so that evaluating the keys also sends the hidden states.
        observes: whether the caches need the queries of new tokens. If so, the attention class must be patched.
    """

    keys: Any
    observes: bool

    def __init__(self, request_caches: Sequence[Any]):
        """Take over the requests' caches. The batch changes these caches in place."""
        self.request_caches = list(request_caches)

    @property
    def recorded(self) -> Sequence[mx.array]:
        """Return the recorded arrays, which the caller must evaluate after each decoded token."""
        return ()

    @property
    @abstractmethod
    def kind(self) -> tuple:
        """Return a tuple that is equal for requests that can decode together."""

    @property
    def offset(self) -> mx.array:
        """Return the position of each request's next token, int32 `(B,)`."""
        return mx.array([cache.offset for cache in self.request_caches], mx.int32)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """Return None, because there is no padding to mask. Subclasses with padding override this method."""
        self._require_single_token(N, window_size)
        return None

    def _require_single_token(self, n_tokens: int, window_size: int | None) -> None:
        """Check that the next step has one token per request and no sliding window."""
        single_token = n_tokens == 1 and window_size is None
        assert single_token, "a batch of compressed caches takes single tokens"

    def extend(self, other: Any) -> None:
        """Append another batch's requests. That batch must not be used afterwards."""
        self.request_caches += other.request_caches

    def filter(self, keep: Sequence[int]) -> None:
        """Keep only the requests at the indices `keep`."""
        self.request_caches = [self.request_caches[i] for i in keep]

    def size(self) -> int:
        """Return the number of entries in the longest request."""
        return max(cache.n_entries for cache in self.request_caches)

    def empty(self) -> bool:
        """Return False, because requests join after prefill, when their caches have entries."""
        return False


class SparseBatchCache(CompressedBatchCache):
    """Sparse caches of several requests. Requests attend one after another, each to its own entries."""

    observes = True
    request_caches: list[SparseKVCache]
    keys = keys_property(lambda batch: batch.request_caches[0])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append one token per request, `(B, n_kv_heads, 1, head_dim)`, and return the keys and values unchanged."""
        for i, request_cache in enumerate(self.request_caches):
            request_cache.update_and_fetch(keys[i : i + 1], values[i : i + 1])
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
        for i, request_cache in enumerate(self.request_caches):
            # Make each request depend on the previous request's output. Otherwise, the temporary arrays of all requests
            # could be in memory together.
            request_queries = mx.depends(queries[i : i + 1], outputs[-1:])
            new_keys = keys[i : i + 1]
            new_values = values[i : i + 1]
            output = request_cache.attend(request_queries, new_keys, new_values, scale, mask, sinks)
            outputs.append(output)
        return mx.concatenate(outputs)

    @property
    def kind(self) -> tuple:
        """Return a constant, because all of these requests can decode together: they share no arrays."""
        return ("chosen",)

    def extract(self, idx: int) -> SparseKVCache:
        """Copy the cache of the request at index `idx`."""
        return copy.deepcopy(self.request_caches[idx])

    @property
    def nbytes(self) -> int:
        """Return the total size of the requests' caches in bytes."""
        return sum(cache.nbytes for cache in self.request_caches)


class EvictingBatchCache(CompressedBatchCache, Quantised):
    """The `EvictingCache`s of several requests, with all entries in shared arrays.

    The arrays have shape `(B, n_kv_heads, R, head_dim)`, or the equivalent for quantised entries. Each request has a
    slot along the batch axis, and `R` is at least the number of rows that the longest request needs. The requests' own
    caches are empty, but still decide where the next entry goes and when to evict. To evict, a cache temporarily gets
    its entries back. Each request therefore keeps exactly the entries that it would keep outside the batch.
    """

    values: Any

    def __init__(self, request_caches: Sequence[EvictingCache]):
        """Copy all requests' entries to shared arrays, and free the originals."""
        super().__init__(request_caches)
        self.quantization = request_caches[0].quantization
        for request_cache in request_caches:
            request_cache.compact()
        self.keys, self.values = _concatenate_requests(
            [cache.keys_and_values() for cache in request_caches]
        )
        self._enlarge(self._n_rows_needed())
        for request_cache in request_caches:
            request_cache.keys = request_cache.values = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Stored, Stored]:
        """Append one entry per request, `(B, n_kv_heads, 1, head_dim)`, and return all entries for attention."""
        for i, request_cache in enumerate(self.request_caches):
            if request_cache.must_evict():
                with self._entries_lent_to(i):
                    request_cache.evict()
                    self._write_back(i)
        next_rows = [cache.claim_row() for cache in self.request_caches]
        self._enlarge(max(next_rows) + 1)
        entries = pack(keys, self.quantization), pack(values, self.quantization)
        if len(set(next_rows)) == 1:  # all requests write to the same row
            write_rows(self._stored, next_rows[0], entries)
        else:
            row_indices = mx.array(next_rows)[:, None, None, None]
            self.keys, self.values = map_arrays(
                lambda buffer, new: mx.put_along_axis(buffer, row_indices, new, axis=2),
                self._stored,
                entries,
            )
        return self.keys_and_values()

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """Return a bool mask `(B, 1, 1, rows)` for the next step, or None if all requests have the same length."""
        self._require_single_token(N, window_size)
        lengths = [cache.n_after_next for cache in self.request_caches]
        if len(set(lengths)) == 1:
            return None
        is_entry = mx.arange(max(lengths)) < mx.array(lengths)[:, None]  # (B, rows)
        return is_entry[:, None, None, :]

    def keys_and_values(self) -> tuple[Stored, Stored]:
        """Return the used rows of the shared arrays."""
        n_used = self.size()
        if n_used == count_rows(self.keys):
            return self._stored
        return slice_rows(self._stored, 0, n_used)

    def record(self, captured: CapturedQueries) -> None:
        """Pass each request's query to its cache if the cache records queries; see `Recorder.record`."""
        for i, request_cache in enumerate(self.request_caches):
            if request_cache.observes:
                request_queries = captured._replace(queries=captured.queries[i : i + 1])
                with self._entries_lent_to(i):
                    request_cache.record(request_queries)

    @property
    def waits_for_readers(self) -> bool:  # type: ignore[override]
        """Return whether other layers still have to read a request's newest entries."""
        return any(cache.waits_for_readers for cache in self.request_caches)

    @property
    def observes(self) -> bool:  # type: ignore[override]
        """Return whether any request records queries for later evictions."""
        return any(cache.observes for cache in self.request_caches)

    @property
    def recorded(self) -> Sequence[mx.array]:
        """Return the arrays that requests have recorded."""
        return [
            array for cache in self.request_caches if cache.observes for array in cache.recorded
        ]

    @property
    def kind(self) -> tuple:
        """Return a tuple that is equal for requests that can share arrays and a mask."""
        request_cache = self.request_caches[0]
        next_length = request_cache.n_after_next
        keeps_length = next_length == request_cache.n_entries
        # Numbers with equal bit lengths differ by less than a factor of 2. This limits padding.
        return keeps_length, next_length.bit_length(), self.quantization

    def extend(self, other: EvictingBatchCache) -> None:
        """Append another batch's requests by copying all entries to new arrays."""
        super().extend(other)
        self.keys, self.values = _concatenate_requests([self._stored, other._stored])

    def filter(self, keep: Sequence[int]) -> None:
        """Keep only the requests at the indices `keep`, and drop rows that are no longer needed."""
        super().filter(keep)
        slot_indices = mx.array(list(keep))
        n_rows = self._n_rows_needed()

        def kept_slots(buffer: mx.array) -> mx.array:
            return mx.contiguous(mx.take(buffer, slot_indices, axis=0)[:, :, :n_rows])

        self.keys, self.values = map_arrays(kept_slots, self._stored)

    def extract(self, idx: int) -> EvictingCache:
        """Copy the cache of the request at index `idx`, including its entries."""
        request_cache = copy.deepcopy(self.request_caches[idx])
        request_cache.keys, request_cache.values = self._copy_entries(idx, request_cache.n_entries)
        return request_cache

    @contextlib.contextmanager
    def _entries_lent_to(self, i: int) -> Iterator[None]:
        """Give the cache of request `i` its entries back within the `with` block."""
        request_cache = self.request_caches[i]
        request_cache.keys, request_cache.values = self._copy_entries(i, request_cache.n_entries)
        try:
            yield
        finally:
            request_cache.keys = request_cache.values = None

    def _write_back(self, i: int) -> None:
        """Copy the entries of request `i` from its cache to its slot of the shared arrays."""
        request_cache = self.request_caches[i]
        n_entries = request_cache.n_entries
        self._enlarge(n_entries)
        entries = slice_rows((request_cache.keys, request_cache.values), 0, n_entries)
        for buffer, array in zip(flat_arrays(self._stored), flat_arrays(entries)):
            buffer[i : i + 1, :, :n_entries] = array

    def _copy_entries(self, i: int, n_entries: int) -> Stored:
        """Copy the first `n_entries` entries of request `i` to arrays with a batch size of 1."""
        return map_arrays(
            lambda buffer: mx.contiguous(buffer[i : i + 1, :, :n_entries]), self._stored
        )

    def _n_rows_needed(self) -> int:
        """Return how many rows the longest request needs, both now and after its next token."""
        return max(max(cache.n_entries, cache.n_after_next) for cache in self.request_caches)

    def _enlarge(self, n_rows: int) -> None:
        """Enlarge the arrays to at least `n_rows` rows."""
        n_allocated = count_rows(self.keys)
        if n_rows > n_allocated:
            n_added = rows_to_allocate(n_rows) - n_allocated
            self.keys, self.values = with_new_rows(self._stored, n_added)

    @property
    def _stored(self) -> Stored:
        """Return all keys and values, including unused rows."""
        return self.keys, self.values

    @property
    def nbytes(self) -> int:
        """Return the size of the shared arrays in bytes, including unused rows."""
        return count_bytes(self._stored)


def _concatenate_requests(entries_of_requests: list[Stored]) -> Stored:
    """Concatenate the requests' arrays along the batch axis. Shorter arrays get rows of zeros."""
    n_rows = max(map(count_rows, entries_of_requests))
    padded = []
    for entries in entries_of_requests:
        n_missing = n_rows - count_rows(entries)
        padded.append(with_new_rows(entries, n_missing) if n_missing else entries)
    return map_arrays(lambda *arrays: mx.concatenate(list(arrays)), *padded)


def compressed_caches(prompt_cache: list) -> list[CompressedBatchCache]:
    """Return the `CompressedBatchCache`s in a batch's prompt cache."""
    return [cache for cache in all_caches(prompt_cache) if isinstance(cache, CompressedBatchCache)]


def kind_of(prompt_cache: list) -> tuple:
    """Return the kinds of a request's caches. Requests with the same kinds can decode together."""
    caches = all_caches(prompt_cache)
    # mlx-lm computes one mask for all full-attention layers. In a batch, layers that read all entries (`BatchKVCache`)
    # need a mask for the padding, but sparse layers don't accept a mask. A request with both types of layers therefore
    # decodes alone: its kind includes a unique id.
    chooses = any(isinstance(cache, SparseBatchCache) for cache in caches)
    pads = any(isinstance(cache, BatchKVCache) for cache in caches)
    unique_id = id(prompt_cache[0]) if chooses and pads else None
    return unique_id, *map(_kind, caches)


def _kind(cache: Any) -> tuple:
    """Return the kind of one layer's cache.

    mlx-lm's caches of the same kind differ in length by less than a factor of 2.
    """
    if isinstance(cache, CompressedBatchCache):
        return cache.kind
    return type(cache).__name__, cache.size().bit_length()


def batch_of_one(cache: Any) -> Any:
    """Convert one layer's cache to a batch of one request."""
    layer = layer_cache(cache)
    if layer.stacks:
        return EvictingBatchCache([cache])
    if layer.chooses:
        return SparseBatchCache([cache])
    return cache.merge([cache])
