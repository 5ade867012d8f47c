"""mlx-lm's own caches behind the contract."""

from collections.abc import Callable
from typing import Any

from mlx_lm.models.cache import KVCache, QuantizedKVCache

from ..entries.entries import Entries
from ..entries.quantization import Quantization, Stored, n_bytes, rows
from .contract import LayerCache, restorer_of


def layer_cache(cache: Any) -> LayerCache:
    """A layer's cache as the contract has it: itself if it is one of ours."""
    if isinstance(cache, LayerCache):
        return cache
    return FullCache(cache=cache) if has_all_entries(cache) else StateCache(cache)


def has_all_entries(cache: Any) -> bool:
    """Whether a policy can choose from a cache; a rotating one has dropped some by itself."""
    return isinstance(cache, (LayerCache, KVCache, QuantizedKVCache))


def full_cache(entries: Entries, sparse_from: int | None = None) -> Any:
    """Return mlx-lm's cache of these entries, as they are stored; see `LayerCache.sparse_from`."""
    how = entries.quantization
    cache: Any = KVCache() if how is None else QuantizedKVCache(how.group_size, how.bits)
    cache.keys, cache.values = entries.stored_keys, entries.stored_values
    cache.offset = len(entries)
    cache.sparse_from = sparse_from
    return cache


class FullCache(LayerCache):
    """A `KVCache` or `QuantizedKVCache`, which holds all entries."""

    grows = True

    def __init__(self, cache: Any):
        self.cache = cache
        if isinstance(cache, QuantizedKVCache):
            self.quantization = Quantization(cache.bits, cache.group_size)

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
    def sample(self) -> tuple[Stored, Stored]:
        return self.cache.keys, self.cache.values

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return n_bytes(rows(self.sample, 0, self.offset)) if self.offset else 0

    def size(self) -> int:
        return self.offset

    def held(self, n_queries: int = 0) -> Entries:
        keys, values = rows(self.sample, 0, self.offset)
        return Entries(keys, values, quantization=self.quantization)

    def saved_form(self) -> Any:
        return self.cache

    def trim(self, n: int) -> int:  # type: ignore[override]
        return self.cache.trim(n)


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

    def restorer(self) -> Callable[[], None]:
        return restorer_of(self.cache)
