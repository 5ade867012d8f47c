"""KV caches that hold all entries and record queries: in memory, or between turns in a store."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, _BaseCache, create_attention_mask

from ..entries.entries import Entries
from ..entries.quantization import join, n_bytes
from ..entries.queries import Read, Recorder
from .adapter import FullCache, plain_cache
from .contract import LosslessCache, Mark
from .stores import EntryView, MemoryStore, Store


class FullRecorder(LosslessCache, Recorder):
    """A cache that holds all entries, and records queries for a policy to come.

    Attributes:
        growing: mlx-lm's cache that new entries are put into.
        repeated: what reading the prompt again has measured; see `Entries`.
    """

    growing: KVCache
    repeated: Any = None
    _shared_votes: dict[tuple[int, ...], mx.array] | None = None

    def observe(
        self, first: int, last: int, capacity: int, statistics_from: int | None = None
    ) -> None:
        """Record the queries of `[first, last)`, of `capacity` tokens in all, and forget those recorded before."""
        self.start_recording(first, last, statistics_from=statistics_from)
        self.growing.step = max(KVCache.step, capacity - self.offset)

    def size(self) -> int:
        return self.offset

    def _with_queries(self, entries: Entries) -> Entries:
        """The entries, with the queries recorded to vote for them."""
        entries = dataclasses.replace(
            entries,
            layer=self.layer,
            statistics=self.statistics,
            given_repeated=self.repeated,
            shared_votes=self._shared_votes,
        )
        if self.n_queries:
            entries.observed = self.voters(self.queries, self.query_positions, entries.keys.shape)
        return entries

    @property  # type: ignore[misc]  # nothing sets the state of a request under way
    def state(self) -> tuple:
        # mlx-lm's prefill loop evaluates the state, and with it the queries.
        return self.growing.keys, self.growing.values, self._queries, self._sums


class RecordingKVCache(FullRecorder, KVCache):
    """A `KVCache` that also records the post-RoPE queries of the positions `[first, last)`.

    Args:
        capacity: entries to allocate at once, so that prefill never regrows the buffers.
        layer: the layer of the model.
    """

    offset: int

    def __init__(self, first: int, last: int, capacity: int, layer: Any = None):
        super().__init__(first, last)
        self.step = capacity
        self.layer = layer

    @property
    def growing(self) -> KVCache:  # type: ignore[override]
        return self

    @property
    def store(self) -> Store:  # type: ignore[override]
        return MemoryStore(cache=self)

    def filled(self, cache: KVCache, n: int) -> RecordingKVCache:
        """The first `n` entries of another cache, with the queries recorded here; arrays and votes are shared."""
        if self._shared_votes is None:
            self._shared_votes = {}
        filled = copy.copy(self)
        filled.keys, filled.values, filled.offset = cache.keys, cache.values, n
        return filled

    def offload(self) -> None:
        """They are where they are."""

    def views(self) -> list[EntryView]:
        return [self.store]

    def growing_cache(self) -> KVCache:
        self.step = KVCache.step
        return self

    def saved_form(self) -> Any:
        return plain_cache(*self.keys_and_values())

    def fill(self, entries: Entries) -> None:
        (self.keys, self.values), self.offset = entries.plain(), len(entries)

    def held(self, n_queries: int = 0) -> Entries:
        return self._with_queries(FullCache(self).held())

    @property
    def kv_nbytes(self) -> int:
        return self.store.nbytes

    def rollback(self, n: int) -> None:
        FullCache(self).rollback(n)


class SharedKVCache(RecordingKVCache):
    """A `KVCache` whose queries several `recorders` of the layer record, which are never fed; see their `filled`."""

    def __init__(self, recorders: Sequence[RecordingKVCache], capacity: int, layer: Any = None):
        super().__init__(0, 0, capacity, layer)
        self.recorders = recorders

    def go_on_from(self, cache: KVCache, capacity: int) -> None:
        """Hold the entries of another cache, whose arrays are shared until they are written."""
        self.keys, self.values, self.offset = cache.keys, cache.values, cache.offset
        self.step = max(KVCache.step, capacity - self.offset)

    def _take_queries(
        self, queries: mx.array, scale: float, sinks: mx.array | None, read: Read
    ) -> None:
        for recorder in self.recorders:
            recorder.offset = self.offset
            recorder._take_queries(queries, scale, sinks, read)

    @property  # type: ignore[misc]  # nothing sets the state of a request under way
    def state(self) -> tuple:
        return self.keys, self.values, [(x._queries, x._sums) for x in self.recorders]


class OffloadedKVCache(FullRecorder, _BaseCache):
    """A KV cache of all tokens: those of earlier turns in a store, those of this turn plain in memory.

    Every attention reads the store's entries anew, so that only one layer's are in memory at a time.

    Attributes:
        growing: the entries since the last `offload`.
    """

    def __init__(self, store: Store, layer: Any = None):
        super().__init__(0, 0)
        self.store = store
        self.growing = KVCache()
        self.layer = layer

    @property
    def offset(self) -> int:  # type: ignore[override]
        """Tokens held."""
        return self.store.n_entries + self.growing.offset

    @property
    def keys(self) -> mx.array | None:
        """The newest entries' buffer, which mlx-lm makes wait for what a pipeline sends."""
        return self.growing.keys

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self.growing.keys = keys

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add `(B, n_kv_heads, L, head_dim)` keys and values; all there are."""
        if self.store.n_entries:
            mx.eval(keys, values)  # and with them the layer before, whose entries can then go
        self.growing.update_and_fetch(keys, values)
        return self._computed()

    def _computed(self) -> tuple[mx.array, mx.array]:
        """`keys_and_values`; what the store gives is computed one after the other, for less memory."""
        keys, values = self.keys_and_values()
        if self.store.n_entries:
            mx.eval(keys)
            mx.eval(values)
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """All keys and values, `(B, n_kv_heads, offset, head_dim)` each."""
        if self.store.n_entries == 0:
            return self.growing.keys_and_values()
        stored = self.store.entries()
        return join(stored, self.growing.keys_and_values()) if self.growing.offset else stored

    def held(self, n_queries: int = 0) -> Entries:
        return self._with_queries(Entries(*self._computed()))

    def offload(self) -> None:
        if self.growing.offset:
            self.store.append(Entries(*self.growing.keys_and_values()))
            self.growing = KVCache()

    def saved_form(self) -> Any:
        self.offload()
        if self.store.cache is not None:
            return self.store.cache
        cache, held = MemoryStore(self.store.quantization).cache, self.store.held()
        cache.keys, cache.values, cache.offset = held.stored_keys, held.stored_values, len(held)
        return cache

    def views(self) -> list[EntryView]:
        parts: list[EntryView] = [self.store, MemoryStore(cache=self.growing)]
        return [part for part in parts if part.n_entries]

    def fill(self, entries: Entries) -> None:
        self.store.append(entries)

    def mark(self) -> None:
        self._mark = Mark({"stored": self.store.n_entries, "growing": copy.copy(self.growing)})

    def rollback(self, n: int) -> None:
        """Drop the newest `n` tokens, whether they are in the store or not."""
        before = self._mark.state if self._mark else {}
        if before and self.offset - n == before["stored"] + before["growing"].offset:
            self.store.truncate(before["stored"])
            self.growing = copy.copy(before["growing"])
        else:
            self.trim(n)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """The mask of the next update of `N` tokens, as mlx-lm's `KVCache` makes it."""
        return create_attention_mask(N, self.offset, return_array, window_size)

    def empty(self) -> bool:
        return self.offset == 0

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Drop the newest `n` tokens; how many those were."""
        n = min(self.offset, n)
        self.store.truncate(self.store.n_entries - (n - self.growing.trim(n)))
        return n

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.store.nbytes + MemoryStore(cache=self.growing).nbytes

    @property
    def full_nbytes(self) -> int:
        return self.offset * n_bytes(self.views()[0].entries(0, 1)) if self.offset else 0
