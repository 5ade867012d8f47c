"""The full KV cache that a prompt is read into before a policy compresses it."""

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
    """Holds all entries of a prompt, as mlx-lm's KV cache does, and records the queries of `[first, last)`.

    Args:
        first: first position whose post-RoPE query is recorded.
        last: position after the last recorded query.
        capacity: number of entries to allocate at once, so that prefill never regrows the buffers.
        layer: the model's `AttentionLayer` that the cache serves.
    """

    grows = converts_to_save = True
    _shared_votes: dict[tuple[int, ...], mx.array] | None = None

    def __init__(self, first: int, last: int, capacity: int, layer: Any = None):
        """Start empty; the first update allocates rows for `capacity` entries."""
        super().__init__(first=first, last=last)
        self.step = capacity  # the number of rows by which mlx-lm's cache grows
        self.layer = layer

    def with_entries_of(self, other: KVCache, n: int) -> RecordingKVCache:
        """Return a cache of the first `n` entries of `other` and the queries recorded here; arrays are shared."""
        if self._shared_votes is None:
            self._shared_votes = {}  # all copies share it: they have the same queries
        cache = copy.copy(self)
        cache.share(other, n)
        return cache

    def share(self, other: KVCache, n: int) -> None:
        """Hold the first `n` entries of `other`, in the arrays of `other`."""
        self.keys, self.values = other.keys, other.values
        self.offset = n

    def fill(self, entries: Entries) -> None:
        """Hold `entries`, unquantised, from position 0 on."""
        self.keys, self.values = entries.plain()
        self.offset = len(entries)

    def held(self, n_queries: int = 0) -> Entries:
        """Return the entries with all recorded queries as voters.

        `n_queries` is ignored, because `first` and `last` say which queries vote.
        """
        keys, values = self.keys_and_values()
        observed = None
        if self.n_queries:
            observed = self.voters(self.queries, self.query_positions, keys.shape)
        return Entries(
            keys,
            values,
            observed,
            layer=self.layer,
            statistics=self.statistics,
            shared_votes=self._shared_votes,
        )

    def saved_form(self) -> Any:
        """Return mlx-lm's own cache of the entries, without the queries."""
        return full_cache(Entries(*self.keys_and_values()), self.sparse_from)

    @property  # type: ignore[misc]  # no setter: the cache is converted before it is saved
    def state(self) -> tuple:
        """Return what mlx-lm's prefill loop evaluates after a chunk: the entries and what was recorded."""
        return self.keys, self.values, self._queries, self.moments.sums
