"""A plain KV cache that keeps the queries of its own tokens."""

import copy
import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..entries.entries import Entries
from ..entries.queries import Read, Recorder
from .adapter import FullCache, plain_cache
from .contract import LayerCache, LosslessCache
from .stores import MemoryStore, Source


class FullRecorder(LosslessCache, Recorder, LayerCache):
    """What the caches have in common that hold all entries, and keep queries for a policy to come.

    Attributes:
        repeated: what reading the prompt again has told; see `Entries`.
    """

    repeated: Any = None
    index: Any = None  # is made for a request
    _shared_votes: dict[tuple[int, int, int], mx.array] | None = None

    def observe(
        self, first: int, last: int, capacity: int, statistics_from: int | None = None
    ) -> None:
        """Keep the queries of `[first, last)`, `capacity` tokens in all; those kept so far are forgotten."""
        self.start_recording(first, last, statistics_from=statistics_from)
        self._expect(capacity)

    @property
    def n_entries(self) -> int:
        return self.offset

    @abstractmethod
    def _expect(self, capacity: int) -> None:
        """Have room for `capacity` tokens at the next allocation."""

    def offload(self) -> None:
        """They are where they are."""

    def saved_form(self) -> Any:
        return plain_cache(*self.keys_and_values())  # type: ignore[attr-defined]  # every cache of ours has it

    def _with_queries(self, entries: Entries) -> Entries:
        """The entries, with the queries recorded to vote for them."""
        known = {"statistics": self.statistics, "given_repeated": self.repeated}
        known["shared_votes"] = self._shared_votes
        entries = dataclasses.replace(entries, layer=self.layer, **known)
        if self.n_queries:
            entries.observed = self.voters(self.queries, self.query_positions, entries.keys.shape)
        return entries


class RecordingKVCache(FullRecorder, KVCache):
    """A `KVCache` that also keeps the post-RoPE queries of the positions `[first, last)`.

    Args:
        capacity: entries to allocate at once, so that prefill never regrows the buffers.
        layer: the layer of the model.
    """

    offset: int

    def __init__(self, first: int, last: int, capacity: int, layer: Any = None):
        super().__init__(first, last)
        self.step = capacity
        self.layer = layer

    def _expect(self, capacity: int) -> None:
        self.step = max(KVCache.step, capacity - self.offset)

    def filled(self, cache: KVCache, n: int) -> "RecordingKVCache":
        """The first `n` entries of another cache, with the queries recorded here; arrays and votes are shared."""
        if self._shared_votes is None:
            self._shared_votes = {}
        filled = copy.copy(self)
        filled.keys, filled.values, filled.offset = cache.keys, cache.values, n
        return filled

    def sources(self) -> list[Source]:
        return [MemoryStore(cache=self)]

    def growing_cache(self) -> KVCache:
        self.step = KVCache.step
        return self

    def fill(self, entries: Entries) -> None:
        (self.keys, self.values), self.offset = entries.plain(), len(entries)

    def held(self, n_queries: int = 0) -> Entries:
        return self._with_queries(FullCache(self).held())

    @property
    def kv_nbytes(self) -> int:
        return FullCache(self).kv_nbytes

    def rollback(self, n: int) -> None:
        FullCache(self).rollback(n)

    @property  # type: ignore[misc]  # nothing sets the state of a request under way
    def state(self):
        # mlx-lm's prefill loop evaluates the state, and with it the queries.
        return self.keys, self.values, self.offset, self._queries, self._sums


class SharedKVCache(RecordingKVCache):
    """A `KVCache` whose queries several recorders hear, each taking those that it wants.

    Args:
        recorders: caches of the same layer, which are never fed themselves; see `RecordingKVCache.filled`.
        capacity, layer: as of `RecordingKVCache`.
    """

    def __init__(self, recorders: Sequence[RecordingKVCache], capacity: int, layer: Any = None):
        super().__init__(0, 0, capacity, layer)
        self.recorders = recorders

    def go_on_from(self, cache: KVCache, capacity: int) -> None:
        """Hold the entries of another cache, whose arrays are shared until they are written."""
        self.keys, self.values, self.offset = cache.keys, cache.values, cache.offset
        self._expect(capacity)

    def _take_queries(
        self, queries: mx.array, scale: float, sinks: mx.array | None, read: Read | None
    ) -> None:
        for recorder in self.recorders:
            recorder.offset = self.offset
            recorder._take_queries(queries, scale, sinks, read)

    @property  # type: ignore[misc]  # nothing sets the state of a request under way
    def state(self):
        heard = [(recorder._queries, recorder._sums) for recorder in self.recorders]
        return self.keys, self.values, self.offset, heard
