"""The KV cache that a prompt is read on before a policy chooses from it."""

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
    """mlx-lm's KV cache, which also records the post-RoPE queries of the positions `[first, last)`.

    Args:
        capacity: entries to allocate at once, so that prefill never regrows the buffers.
        layer: the layer of the model.
    """

    grows = converts_to_save = True
    _shared_votes: dict[tuple[int, ...], mx.array] | None = None

    def __init__(self, first: int, last: int, capacity: int, layer: Any = None):
        super().__init__(first, last)
        self.step, self.layer = capacity, layer

    def filled(self, other: KVCache, n: int) -> RecordingKVCache:
        """Return a cache with the first `n` entries of `other` and the queries recorded here; arrays are shared."""
        self._shared_votes = {} if self._shared_votes is None else self._shared_votes
        filled = copy.copy(self)
        filled.share(other, n)
        return filled

    def share(self, other: KVCache, n: int) -> None:
        """Hold the first `n` entries of another cache, whose arrays are shared until they are written."""
        cache = full_cache(Entries(other.keys, other.values))
        self.keys, self.values, self.offset = cache.keys, cache.values, n

    def fill(self, entries: Entries) -> None:
        """Hold these entries, the first there are."""
        self.keys, self.values = entries.plain()
        self.offset = len(entries)

    def held(self, n_queries: int = 0) -> Entries:
        keys, values = self.keys_and_values()
        return Entries(
            keys,
            values,
            self.voters(self.queries, self.query_positions, keys.shape) if self.n_queries else None,
            layer=self.layer,
            statistics=self.statistics,
            shared_votes=self._shared_votes,
        )

    def saved_form(self) -> Any:
        return full_cache(Entries(*self.keys_and_values()), self.sparse_from)

    @property  # type: ignore[misc]  # the state of a request under way is not restored
    def state(self) -> tuple:
        """Return what mlx-lm's prefill loop evaluates after a chunk: the entries and what was recorded."""
        return self.keys, self.values, self._queries, self.moments.sums
