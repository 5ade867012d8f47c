"""The full KV cache that holds a prompt until a policy compresses it."""

from __future__ import annotations

import copy
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..caches.adapter import full_cache
from ..caches.contract import LayerCache
from ..entries.entries import Entries
from ..entries.queries import Recorder


class RecordingKVCache(Recorder, LayerCache, KVCache):
    """A `KVCache` that keeps all of a prompt's entries and records the queries at positions `[first, last)`.

    Args:
        first: first position whose post-RoPE query is recorded.
        last: position after the last recorded query.
        capacity: number of entries to allocate up front, so that prefill never reallocates the buffers.
        layer: the cache's `AttentionLayer`.
    """

    grows = True
    _shared_votes: dict[tuple[int, ...], mx.array] | None = None

    def __init__(self, first: int, last: int, capacity: int, layer: Any = None):
        """Start empty. The first update allocates rows for `capacity` entries."""
        super().__init__(first=first, last=last)
        self.step = capacity  # mlx-lm's cache allocates this many rows at a time
        self.layer = layer

    def with_entries_of(self, other: KVCache, n: int) -> RecordingKVCache:
        """Return a cache with `other`'s first `n` entries and this cache's queries, without copying arrays."""
        if self._shared_votes is None:
            self._shared_votes = {}  # shared by all copies, since their queries are the same
        cache = copy.copy(self)
        cache.share_entries_of(other, n)
        return cache

    def share_entries_of(self, other: KVCache, n: int) -> None:
        """Share the first `n` entries of `other` without copying them."""
        self.keys, self.values = other.keys, other.values
        self.offset = n

    def fill(self, entries: Entries) -> None:
        """Fill the cache with the dequantised `entries`, starting at position 0."""
        self.keys, self.values = entries.dequantized()
        self.offset = len(entries)

    def held(self) -> Entries:
        """Return the entries, with the recorded queries as voters."""
        keys, values = self.keys_and_values()
        return Entries(
            keys,
            values,
            self.recorded_voters(keys.shape),
            layer=self.layer,
            statistics=self.statistics,
            shared_votes=self._shared_votes,
        )

    def cache_to_save(self) -> Any:
        """Return one of mlx-lm's caches with the same entries, but without the queries."""
        return full_cache(Entries(*self.keys_and_values()), self.sparse_from)

    @property  # type: ignore[misc]  # no setter: the cache is converted before it is saved
    def state(self) -> tuple:
        """Return the arrays that mlx-lm's prefill loop evaluates after each chunk."""
        return self.keys, self.values, self._queries, self.moments.sums
