"""Adapters that implement `LayerCache` for mlx-lm's caches."""

from collections.abc import Callable
from typing import Any

from mlx_lm.models.cache import KVCache, QuantizedKVCache

from ..entries.entries import Entries
from ..entries.quantization import Quantization, Stored, count_bytes, slice_rows
from .contract import LayerCache, restorer_of


def layer_cache(cache: Any) -> LayerCache:
    """Return a layer's cache as a `LayerCache`, wrapping mlx-lm's caches in an adapter."""
    if isinstance(cache, LayerCache):
        return cache
    return FullCache(cache=cache) if has_all_entries(cache) else StateCache(cache)


def has_all_entries(cache: Any) -> bool:
    """Return whether a policy can choose among a cache's entries.

    This is true for a `KVCache`, but not for a rotating cache.
    """
    return isinstance(cache, (LayerCache, KVCache, QuantizedKVCache))


def full_cache(entries: Entries, sparse_from: int | None = None) -> Any:
    """Return an mlx-lm cache that holds `entries`. The cache is quantised if the entries are.

    Args:
        entries: the entries of one layer.
        sparse_from: see `LayerCache`.
    """
    quantization = entries.quantization
    cache: Any = KVCache()
    if quantization is not None:
        cache = QuantizedKVCache(group_size=quantization.group_size, bits=quantization.bits)
    cache.keys, cache.values = entries.stored_keys, entries.stored_values
    cache.offset = len(entries)
    cache.sparse_from = sparse_from
    return cache


class FullCache(LayerCache):
    """Adapter for `KVCache` and `QuantizedKVCache`, which keep all entries."""

    grows = True

    def __init__(self, cache: Any):
        """Wrap a cache without copying its entries."""
        self.cache = cache
        if isinstance(cache, QuantizedKVCache):
            self.quantization = Quantization(cache.bits, cache.group_size)

    @property
    def offset(self) -> int:  # type: ignore[override]
        """Return the number of tokens in mlx-lm's cache."""
        return self.cache.offset

    @property
    def sparse_from(self) -> int | None:  # type: ignore[override]
        """Return the position of the first entry computed with sparse attention.

        Return None if there was no such entry, or if it has been trimmed.
        """
        position = getattr(self.cache, "sparse_from", None)
        was_trimmed = position is not None and position >= self.cache.offset
        return None if was_trimmed else position

    @sparse_from.setter
    def sparse_from(self, position: int | None) -> None:
        self.cache.sparse_from = position

    @property
    def sample_entries(self) -> tuple[Stored, Stored]:
        """Return the whole buffers, including unused rows."""
        return self.cache.keys, self.cache.values

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Return the size of all entries in bytes, not counting unused rows."""
        if self.offset == 0:
            return 0
        return count_bytes(slice_rows(self.sample_entries, 0, self.offset))

    def size(self) -> int:
        """Return the number of entries, one per token."""
        return self.offset

    def held(self) -> Entries:
        """Return the entries. They have no voters, because mlx-lm's caches don't record queries."""
        keys, values = slice_rows(self.sample_entries, 0, self.offset)
        return Entries(keys, values, quantization=self.quantization)

    def cache_to_save(self) -> Any:
        """Return the wrapped mlx-lm cache."""
        return self.cache

    def trim(self, n: int) -> int:  # type: ignore[override]
        """Drop the `n` newest tokens, or all if there are fewer. Return the number dropped."""
        return self.cache.trim(n)


class StateCache(LayerCache):
    """Adapter for mlx-lm's other caches (linear states and sliding windows), which policies leave alone."""

    kv_nbytes = 0  # type: ignore[assignment]

    def __init__(self, cache: Any):
        """Wrap a cache without copying its arrays."""
        self.cache = cache

    @property
    def offset(self) -> int:  # type: ignore[override]
        """Return the number of tokens read, or 0 for linear states, which don't count tokens."""
        return getattr(self.cache, "offset", 0)

    @property
    def sample_entries(self) -> tuple[Stored, Stored]:
        """Return a sliding window's buffers. Raises: AttributeError: the cache has a linear state."""
        return self.cache.keys, self.cache.values

    def size(self) -> int:
        """Return the number of entries in a sliding window, or 0 for linear states."""
        return self.cache.size()

    def cache_to_save(self) -> Any:
        """Return the wrapped mlx-lm cache."""
        return self.cache

    def held(self) -> Entries:
        """Raise TypeError, because no policy can choose among these entries."""
        raise TypeError(f"a {type(self.cache).__name__} has no entries to choose from")

    def restorer(self) -> Callable[[], None]:
        """Return a function that restores all of the cache's attributes, because the cache can't be trimmed."""
        return restorer_of(self.cache)
