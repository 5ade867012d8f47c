"""`LayerCache`, a common interface to all layers' caches, and helpers that restore a cache to an earlier state."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import cache as mlx_cache

from ..entries.entries import Entries
from ..entries.quantization import Quantization, Stored, count_bytes, flat_arrays, slice_rows


class LayerCache(ABC):
    """One layer's cache: one of this package's caches, or an adapter for one of mlx-lm's.

    `adapter.layer_cache` creates the adapters.
    """

    offset: int  # number of tokens read, which is also the next token's position
    # None if the entries are not quantised, or if the store quantises them.
    quantization: Quantization | None = None
    store: Any = None  # the `Store` that keeps all entries between turns, if there is one
    # Whether entries have been or will be evicted, or whether answer tokens read only some of the entries.
    is_compressed: bool = False
    # Whether entries are only ever appended, so that the newest tokens can be trimmed.
    grows: bool = False
    # Whether the cache needs the queries of new tokens. If so, attention classes must be patched.
    observes: bool = False
    chooses: bool = False  # whether new tokens read only the entries that their queries choose
    # Whether a batch can stack the cache's entries with other requests' entries in one array.
    stacks: bool = False
    # Position of the first entry that was computed with sparse attention, or None if there isn't one.
    sparse_from: int | None = None
    block: int = 1  # number of tokens between evictions
    room: float = math.inf  # number of tokens that fit before the next eviction
    nbytes: int
    size: Callable[[], int]
    # Drops the `n` newest tokens and returns the number dropped. Only for caches whose `grows` is true.
    trim: Callable[[int], int]
    file_nbytes: int = 0  # size in bytes of the keys, values and indexes that are stored in files

    @property
    def recorded(self) -> Sequence[mx.array]:
        """Return arrays that the caller must evaluate after each decoded token.

        They are the recorded queries and sums over queries, if there are any.
        """
        return ()

    @property
    def n_entries(self) -> int:
        """Return the number of entries per KV head or, in a sparse cache, the number that the next model call reads."""
        return self.size()

    @property
    def n_after_next(self) -> int:
        """Return what `n_entries` will be after one more token."""
        return self.n_entries + 1

    @property
    def kv_nbytes(self) -> int:
        """Return the size in bytes of keys, values and indexes in memory."""
        return self.nbytes

    @abstractmethod
    def held(self) -> Entries:
        """Return the entries in order of position, with any recorded queries as voters."""

    def stored_entries(self) -> Entries:
        """Return the entries as stored: quantised, if the cache or its store quantises them."""
        return self.held()

    def cache_to_save(self) -> Any:
        """Return a cache that mlx-lm can save and load, with the same entries."""
        return self

    @property
    def in_files(self) -> bool:
        """Return whether the cache's store uses files.

        During a request, new entries can still be in memory.
        """
        return self.store is not None and self.store.in_files

    @property
    def sample_entries(self) -> tuple[Stored, Stored]:
        """Return a sample of the stored keys and values, for checking shapes and dtypes against a model."""
        return self.keys, self.values  # type: ignore[attr-defined]

    def validate(self) -> str | None:
        """Describe what is wrong with a loaded cache, or return None if it is consistent."""
        row_counts = {array.shape[2] for array in flat_arrays(self.sample_entries)}
        is_consistent = (
            len(row_counts) == 1
            and type(self.offset) is int  # a file could contain true or 1.5
            and 0 < self.n_entries <= min(row_counts)
        )
        return None if is_consistent else "has numbers that contradict each other"

    @property
    def full_nbytes(self) -> int:
        """Return the size in bytes of a full, unquantised cache of the same tokens."""
        if not self.offset:
            return 0
        first_entry = slice_rows(self.held().dequantized(), 0, 1)
        return self.offset * count_bytes(first_entry)

    def restorer(self) -> Callable[[], None]:
        """Return a function that restores the cache to its current state.

        The function can be called more than once. It trims the cache, so caches whose `grows` is false override this
        method.
        """
        assert self.grows, f"a {type(self).__name__} can't be restored"
        offset_before = self.offset

        def restore() -> None:
            n_new = self.offset - offset_before
            self.trim(n_new)

        return restore


def keys_property(owner_of: Callable[[Any], Any]) -> Any:
    """Return a property that reads and writes `owner_of(cache).keys`.

    mlx-lm's pipelines need it: they make the last cache's keys depend on the hidden states sent to the next process, so
    that evaluating the cache also sends the hidden states.
    """

    def get_keys(cache: Any) -> mx.array:
        return owner_of(cache).keys

    def set_keys(cache: Any, keys: mx.array) -> None:
        owner_of(cache).keys = keys

    return property(get_keys, set_keys)


def restorer_of(cache: Any) -> Callable[[], None]:
    """Return a function that resets a cache's attributes to their current values.

    The function can be called more than once.
    """
    attributes_before = _copy_attributes(vars(cache))

    def restore() -> None:
        vars(cache).clear()
        vars(cache).update(_copy_attributes(attributes_before))

    return restore


def _copy_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """Copy attributes, including arrays and lists, so that later writes don't affect the copies."""

    def copy_leaf(value: Any) -> Any:
        # The copy and the original share memory until one of them is written to.
        return copy.copy(value) if isinstance(value, mx.array) else value

    return tree_map(copy_leaf, attributes)


def loadable(cls: type) -> type:
    """Register a cache class with mlx-lm's `load_prompt_cache`, which looks up classes by name."""
    setattr(mlx_cache, cls.__name__, cls)
    return cls
