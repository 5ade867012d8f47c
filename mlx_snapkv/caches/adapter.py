"""mlx-lm's own caches behind the contract."""

from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from ..entries.entries import Entries
from ..entries.quantization import Stored, arrays
from ..errors import TrimError
from .contract import LayerCache, Mark
from .evicting import snapshot
from .stores import MemoryStore


def layer_cache(cache: Any) -> LayerCache:
    """A layer's cache as the contract has it: itself if it is one of ours."""
    if isinstance(cache, LayerCache):
        return cache
    return FullCache(cache=cache) if has_all_entries(cache) else StateCache(cache)


def has_all_entries(cache: Any) -> bool:
    """Whether a policy can choose from a cache; a rotating one has dropped some by itself."""
    return isinstance(cache, (LayerCache, KVCache, QuantizedKVCache))


def full_cache(entries: Entries, noted: LayerCache | None = None) -> Any:
    """mlx-lm's cache of these entries, as they are stored, with what another cache has noted about them."""
    cache = MemoryStore(entries.quantization).cache
    cache.keys, cache.values = entries.stored_keys, entries.stored_values
    cache.offset = len(entries)
    if noted is not None:
        take_notes(layer_cache(cache), noted)
    return cache


def take_notes(cache: LayerCache, other: LayerCache) -> None:
    """Note in a cache what another one of the same tokens has noted."""
    cache.sparse_from, cache.token_ids = other.sparse_from, other.token_ids


class KnownTokens(NamedTuple):
    """The first tokens of a cache, and what shows that they still are: its last layer's keys depend on all of them."""

    ids: mx.array  # `(n,)`
    first_numbers: mx.array  # of their keys, as they are stored, `(n,)`


class FullCache(MemoryStore, LayerCache):  # type: ignore[override]
    """A `KVCache` or `QuantizedKVCache`, which holds all entries."""

    @property
    def offset(self) -> int:  # type: ignore[override]
        return self.cache.offset

    @property
    def sparse_from(self) -> int | None:  # type: ignore[override]
        first = getattr(self.cache, "sparse_from", None)
        return first if first is not None and first < self.cache.offset else None

    @sparse_from.setter
    def sparse_from(self, position: int | None) -> None:
        self.cache.sparse_from = position

    @property
    def token_ids(self) -> mx.array | None:  # type: ignore[override]
        """Those whose keys are there still: who trims mlx-lm's cache, and goes on with other tokens, tells nobody."""
        known: KnownTokens | None = getattr(self.cache, "token_ids", None)
        if known is None:
            return None
        same = known.first_numbers[: self.offset] == self._first_numbers(known.ids.size)
        return known.ids[: mx.cumprod(same.astype(mx.int32)).sum().item()]

    @token_ids.setter
    def token_ids(self, ids: mx.array | None) -> None:
        known = None if ids is None else KnownTokens(ids, self._first_numbers(ids.size))
        mx.eval(known)  # or the numbers' keys could not be written to
        self.cache.token_ids = known

    def _first_numbers(self, n: int) -> mx.array:
        """The first number of each of the first `n` keys, `(n,)`, or of as many as there are, as it is stored."""
        return mx.contiguous(arrays(self.cache.keys)[0][0, 0, : min(n, self.offset), 0])

    @property
    def sample(self) -> tuple[Stored, Stored]:
        return self.cache.keys, self.cache.values

    def held(self, n_queries: int = 0) -> Entries:
        return super().held()

    def saved_form(self) -> Any:
        return self.cache

    def rollback(self, n: int) -> None:
        if n > self.offset:
            raise TrimError(f"this cache holds {self.offset} tokens, {n} can't be rolled back")
        self.truncate(self.offset - n)


class StateCache(LayerCache):
    """Any other cache of mlx-lm's, which no policy touches: linear states, sliding windows."""

    kv_nbytes = 0  # type: ignore[assignment]

    def __init__(self, cache: Any):
        self.cache = cache

    @property
    def offset(self) -> int:  # type: ignore[override]
        return getattr(self.cache, "offset", 0)

    @property
    def sample(self) -> tuple[Stored, Stored]:
        return self.cache.keys, self.cache.values

    def size(self) -> int:
        return self.cache.size()

    def saved_form(self) -> Any:
        return self.cache

    def held(self, n_queries: int = 0) -> Entries:
        raise TypeError(f"a {type(self.cache).__name__} has no entries to choose from")

    def mark(self) -> None:
        self._mark = Mark(snapshot(vars(self.cache)))

    def rollback(self, n: int) -> None:
        """Back to this wrapper's mark, whatever `n` is: `layer_cache` makes a new wrapper at each call."""
        if self._mark is None:
            raise TrimError("a linear state or sliding window goes back to a mark only")
        vars(self.cache).update(snapshot(self._mark.state))
