"""Batched caches: one layer's caches of several requests that decode together, and which requests can."""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import BatchKVCache, CacheList, _BaseCache

from ..caches.adapter import layer_cache
from ..caches.contract import keys_of
from ..caches.layers import members
from ..compress.evicting import EvictingCache
from ..entries.quantization import (
    Quantised,
    Stored,
    arrays,
    each,
    grown,
    n_bytes,
    n_rows,
    pack,
    rows,
    with_room,
    write,
)
from ..entries.queries import Captured
from ..sparse.cache import SparseKVCache


class BatchCache(ABC):
    """The interface of one layer's batched cache, which `MlxLmBatch` gives to mlx-lm's own caches.

    Attributes:
        observes: whether the cache receives the queries of later tokens, so that the attention class must be patched.
        chooses: whether each request's queries choose the entries that a step reads.
        pads: whether the entries of shorter requests are hidden by a mask.
    """

    observes: bool
    chooses: bool
    pads: bool = False

    @property
    def recorded(self) -> Sequence[mx.array]:
        """Return the arrays recorded of the requests' queries, to be evaluated between two tokens."""
        return ()

    @property
    @abstractmethod
    def kind(self) -> tuple:
        """Return a value that is equal for requests that can decode together."""

    @abstractmethod
    def size(self) -> int:
        """Return the number of entries held, or read in a step, by the request with the most entries."""


class MlxLmBatch(BatchCache):
    """Adapts a batched cache of mlx-lm, of any layer."""

    observes = chooses = False

    def __init__(self, cache: Any):
        """Adapt the cache; mlx-lm pads only the entries of its `BatchKVCache`."""
        self._cache = cache
        self.pads = isinstance(cache, BatchKVCache)

    @property
    def kind(self) -> tuple:
        """Return a kind that bounds the padding: the numbers of entries differ by less than a factor of 2."""
        return type(self._cache).__name__, self.size().bit_length()

    def size(self) -> int:
        """Return the number of entries as mlx-lm counts them, padding included."""
        return self._cache.size()


class Batched(BatchCache, _BaseCache):
    """Compressed caches of one layer, one for each request, with the interface of mlx-lm's batched caches.

    A step decodes one token of each request.

    Attributes:
        members: the requests' own caches.
        keys: keys that a step reads; mlx-lm makes them depend on what a pipeline sends.
    """

    keys: Any

    def __init__(self, members: Sequence[Any]):
        """Take over the requests' caches, which change with the batch."""
        self.members = list(members)

    @property
    def offset(self) -> mx.array:
        """Return the position of each request's next token, int32 `(B,)`."""
        return mx.array([member.offset for member in self.members], mx.int32)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """Return the mask of the next update: None, unless the entries of shorter requests have to be hidden."""
        assert N == 1 and window_size is None, "a batch of compressed caches takes single tokens"
        return None

    def extend(self, other: Any) -> None:
        """Append the requests of another batch, which is not used afterwards."""
        self.members += other.members

    def filter(self, keep: Sequence[int]) -> None:
        """Keep only the requests with these indices."""
        self.members = [self.members[i] for i in keep]

    def size(self) -> int:
        """Return the number of entries of the request with the most entries."""
        return max(member.n_entries for member in self.members)

    def empty(self) -> bool:
        """Return False: requests join only after their prompts have been read."""
        return False


class BatchedChoices(Batched):
    """Caches of several requests under sparse attention: each attends to its own entries, one after the other."""

    chooses = observes = True
    members: list[SparseKVCache]
    keys = keys_of(lambda batch: batch.members[0])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append a token's keys and values of each request, `(B, n_kv_heads, 1, head_dim)`, and return them."""
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
        """Return the attention of one token of each request; see `SparseKVCache.attend`."""
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
        """Return one kind for all sparse requests: they share no arrays, so their lengths may differ."""
        return ("chosen",)

    def extract(self, idx: int) -> SparseKVCache:
        """Return a copy of a request's cache."""
        return copy.deepcopy(self.members[idx])

    @property
    def nbytes(self) -> int:
        """Return the bytes of all requests' caches in memory."""
        return sum(member.nbytes for member in self.members)


class BatchedEntries(Batched, Quantised):
    """Caches that evict, with the entries of all requests in shared arrays.

    The arrays are `(B, n_kv_heads, R, head_dim)`, or their quantised parts, with a slot for each request; `R` is the
    number of rows that the longest request needs. The requests' own caches are without entries, but still decide which
    row the next entry goes to and when to evict. For an eviction, a cache gets its slot back. So a request keeps the
    entries that it would keep alone.
    """

    chooses = False
    values: Any

    def __init__(self, members: Sequence[EvictingCache]):
        """Copy the entries of all requests into shared arrays, and free the requests' own."""
        super().__init__(members)
        self.quantization = members[0].quantization
        for member in members:
            member.flush()
        self.keys, self.values = _stacked([member.keys_and_values() for member in members])
        self._make_room(self._n_needed())
        for member in members:
            member.keys = member.values = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Stored, Stored]:
        """Add an entry of each request, `(B, n_kv_heads, 1, head_dim)`, and return all entries for the attention."""
        for i, member in enumerate(self.members):
            if member.is_due():
                with self._lend_slot(i, write_back=True):
                    member.evict()
        next_rows = [member.place() for member in self.members]
        self._make_room(max(next_rows) + 1)
        entries = pack(keys, self.quantization), pack(values, self.quantization)
        if len(set(next_rows)) == 1:
            write(self._stored, next_rows[0], entries)
        else:  # `write` takes one row for all requests
            index = mx.array(next_rows)[:, None, None, None]
            self.keys, self.values = each(
                lambda held, new: mx.put_along_axis(held, index, new, axis=2), self._stored, entries
            )
        return self.keys_and_values()

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | None:
        """Return the mask of the next update: bool `(B, 1, 1, rows)`, or None if all requests have as many entries."""
        super().make_mask(N, return_array, window_size)
        counts = [member.n_after_next for member in self.members]
        if len(set(counts)) == 1:
            return None
        is_entry = mx.arange(max(counts)) < mx.array(counts)[:, None]  # (B, rows)
        return is_entry[:, None, None, :]

    def keys_and_values(self) -> tuple[Stored, Stored]:
        """Return the arrays up to the last entry of any request, without the buffers' spare room."""
        n = self.size()
        return self._stored if n == n_rows(self.keys) else rows(self._stored, 0, n)

    def record(self, captured: Captured) -> None:
        """Let each request's cache that observes record its query; see `Recorder.record`."""
        for i, member in enumerate(self.members):
            if member.observes:
                member_queries = captured._replace(heads=captured.heads[i : i + 1])
                with self._lend_slot(i):
                    member.record(member_queries)

    @property
    def waits_for_readers(self) -> bool:  # type: ignore[override]
        """Return whether any request's newest entries have yet to be read by other layers."""
        return any(member.waits_for_readers for member in self.members)

    @property
    def observes(self) -> bool:  # type: ignore[override]
        """Return whether any request records queries, for evictions during the answer."""
        return any(member.observes for member in self.members)

    @property
    def recorded(self) -> Sequence[mx.array]:
        """Return the recorded arrays of all requests that observe."""
        return [array for member in self.members if member.observes for array in member.recorded]

    @property
    def kind(self) -> tuple:
        """Return a value that is equal for requests that can share arrays, and mlx-lm's one mask for all layers."""
        member = self.members[0]
        n_next = member.n_after_next
        is_fixed = n_next == member.n_entries
        # Equal bit lengths: the numbers of entries differ by less than a factor of 2, which bounds the padding.
        return is_fixed, n_next.bit_length(), self.quantization

    def extend(self, other: BatchedEntries) -> None:
        """Append the requests of another batch, and copy the entries of both into new arrays."""
        super().extend(other)
        self.keys, self.values = _stacked([self._stored, other._stored])

    def filter(self, keep: Sequence[int]) -> None:
        """Keep only the requests with these indices, and drop rows that they don't need."""
        super().filter(keep)
        index = mx.array(list(keep))
        n = self._n_needed()
        self.keys, self.values = each(
            lambda slots: mx.contiguous(mx.take(slots, index, axis=0)[:, :, :n]), self._stored
        )

    def extract(self, idx: int) -> EvictingCache:
        """Return a copy of a request's cache, with its entries."""
        member = copy.deepcopy(self.members[idx])
        member.keys, member.values = self._copy_entries(idx, member.n_entries)
        return member

    @contextlib.contextmanager
    def _lend_slot(self, i: int, write_back: bool = False) -> Iterator[None]:
        """Give a request's cache its entries for the block.

        Args:
            i: index of the request.
            write_back: whether the block changes the entries, so that they are written into the shared arrays.
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
        """Return a copy of the first `n` entries of a request, with a batch axis of 1."""
        return each(lambda slots: mx.contiguous(slots[i : i + 1, :, :n]), self._stored)

    def _n_needed(self) -> int:
        """Return the rows that the longest request needs, now or for its next token."""
        return max(max(member.n_entries, member.n_after_next) for member in self.members)

    def _make_room(self, n: int) -> None:
        """Grow the arrays if they have fewer than `n` rows."""
        n_now = n_rows(self.keys)
        if n > n_now:
            n_added = with_room(n) - n_now
            self.keys, self.values = grown(self._stored, n_added)

    @property
    def _stored(self) -> Stored:
        """Return keys and values of all slots, free rows included."""
        return self.keys, self.values

    @property
    def nbytes(self) -> int:
        """Return the bytes of the shared arrays, free rows included."""
        return n_bytes(self._stored)


def _stacked(slots: list[Stored]) -> Stored:
    """Concatenate slots along the batch axis, padded to the rows of the longest."""
    n = max(map(n_rows, slots))
    padded = []
    for slot in slots:
        n_missing = n - n_rows(slot)
        padded.append(grown(slot, n_missing) if n_missing else slot)
    return each(lambda *parts: mx.concatenate(list(parts)), *padded)


def batch_caches(prompt_cache: list) -> list[BatchCache]:
    """Return the batched caches of all layers."""
    caches = members(prompt_cache)
    return [cache if isinstance(cache, BatchCache) else MlxLmBatch(cache) for cache in caches]


def kind_of(prompt_cache: list) -> tuple:
    """Return the kinds of a request's caches: requests of equal kinds can decode together."""
    caches = batch_caches(prompt_cache)
    has_choosing = any(cache.chooses for cache in caches)
    has_padded = any(cache.pads for cache in caches)
    # mlx-lm makes one mask for all layers. A sparse request's layers that read all entries would need their own, so
    # such a request decodes alone: the identity of its first cache makes its kind different from all others.
    own_identity = id(prompt_cache[0]) if has_choosing and has_padded else None
    return own_identity, *(cache.kind for cache in caches)


def batched(cache: Any) -> Any:
    """Return a request's cache of one layer as a batch of one request."""
    if isinstance(cache, CacheList):
        return CacheList(*map(batched, cache.caches))
    layer = layer_cache(cache)
    if layer.stacks:
        return BatchedEntries([cache])
    if layer.chooses:
        return BatchedChoices([cache])
    return cache.merge([cache])
