"""`LayerCache`, the interface that the package expects of every layer's cache, and functions that restore a cache."""

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models import cache as mlx_cache

from ..entries.entries import Entries
from ..entries.quantization import Quantization, Stored, arrays, n_bytes, rows


class LayerCache(ABC):
    """The cache of one layer: one of this package, or an adapter around mlx-lm's (`adapter.layer_cache`)."""

    offset: int  # number of tokens read, which is the position of the next token
    quantization: Quantization | None = None  # quantisation of the entries; None if they are plain
    store: Any = None  # the `Store` that keeps all entries between turns; None without one
    is_compressed: bool = False  # whether entries were or will be evicted, or tokens read only some
    converts_to_save: bool = False  # whether `cache_to_save` returns another cache
    # Whether entries are only appended, so that the newest tokens can be trimmed.
    grows: bool = False
    observes: bool = False  # whether it records queries, for which the attention class is patched
    chooses: bool = False  # whether a call reads only the entries that its queries choose
    # Whether a batch can store its entries in one array with those of other requests.
    stacks: bool = False
    needs_layer: bool = False  # whether its `layer` must be set after loading; see `matching.adopt`
    # Position of the first entry that sparse attention computed; None if every entry saw all earlier ones.
    sparse_from: int | None = None
    block: int = 1  # number of tokens between two evictions
    room: float = math.inf  # number of tokens that fit in before the next eviction
    nbytes: int
    size: Callable[[], int]
    # Drops the `n` newest tokens, and returns the number dropped; only for caches that `grow`.
    trim: Callable[[int], int]
    file_nbytes: int = 0  # bytes of keys and values in files

    @property
    def recorded(self) -> Sequence[mx.array]:
        """Return recorded arrays, which are evaluated between two decoded tokens."""
        return ()

    @property
    def n_entries(self) -> int:
        """Return the number of entries per KV head."""
        return self.size()

    @property
    def n_after_next(self) -> int:
        """Return the number of entries, or of entries that a token reads, after one more token."""
        return self.n_entries + 1

    @property
    def n_before_next(self) -> int:
        """Return the number of earlier entries that the next tokens of a prompt read."""
        return self.n_entries

    @property
    def kv_nbytes(self) -> int:
        """Return the bytes of keys and values in memory, including unused rows."""
        return self.nbytes

    @abstractmethod
    def held(self, n_queries: int = 0) -> Entries:
        """Return the entries as stored, in order of position, with the last `n_queries` recorded queries as voters."""

    def stored_entries(self) -> Entries:
        """Return the entries as stored, without queries."""
        return self.held()

    def cache_to_save(self) -> Any:
        """Return a cache with the same entries that mlx-lm can save and load."""
        return self

    @property
    def in_files(self) -> bool:
        """Return whether entries are in files. The entries of a running request may still be in memory."""
        return self.store is not None and self.store.in_files

    @property
    def sample(self) -> tuple[Stored, Stored]:
        """Return some stored keys and values, whose shapes and dtypes are compared with a model's."""
        return self.keys, self.values  # type: ignore[attr-defined]

    def validate(self) -> str | None:
        """Describe an inconsistency in a loaded cache; return None if the cache is consistent."""
        n_rows, *other_numbers = {x.shape[2] for x in arrays(self.sample)}
        is_sound = (
            not other_numbers
            and type(self.offset) is int  # a file may contain true or 1.5
            and 0 < self.n_entries <= n_rows
        )
        return None if is_sound else "has numbers that contradict each other"

    @property
    def full_nbytes(self) -> int:
        """Return the bytes of a full cache of all tokens, without eviction or quantisation."""
        if not self.offset:
            return 0
        first_entry = rows(self.held().plain(), 0, 1)
        return self.offset * n_bytes(first_entry)

    def restorer(self) -> Callable[[], None]:
        """Return a function that restores the present state of the cache. It may be called repeatedly.

        Caches that `grow` are trimmed. Other caches override this method.
        """
        assert self.grows, f"a {type(self).__name__} can't be restored"
        offset_before = self.offset

        def restore() -> None:
            self.trim(self.offset - offset_before)

        return restore


def keys_property(owner: Callable[[Any], Any]) -> Any:
    """Return a property for the key buffer of `owner(cache)`, to which mlx-lm's pipelines add a dependency."""

    def get_keys(cache: Any) -> mx.array:
        return owner(cache).keys

    def set_keys(cache: Any, keys: mx.array) -> None:
        owner(cache).keys = keys

    return property(get_keys, set_keys)


def restorer_of(cache: Any) -> Callable[[], None]:
    """Return a function that restores the present attributes of a cache. It may be called repeatedly."""
    before = _copied(vars(cache))

    def restore() -> None:
        vars(cache).clear()
        vars(cache).update(_copied(before))

    return restore


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Copy attributes, including arrays and lists, so that later writes do not change the copies."""
    # The copy of an array shares memory until one of them is written.
    return tree_map(lambda x: copy.copy(x) if isinstance(x, mx.array) else x, attributes)


def loadable(cls: type) -> type:
    """Make a class of this package visible to mlx-lm's `load_prompt_cache`, which looks up classes by name."""
    setattr(mlx_cache, cls.__name__, cls)
    return cls
