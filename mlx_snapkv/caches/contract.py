"""`LayerCache`, the interface of every layer's cache, and how a cache is restored."""

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
    """One layer's cache: one of this package's, or mlx-lm's in an adapter (`adapter.layer_cache`)."""

    offset: int  # position of the next token; tokens fed so far
    quantization: Quantization | None = None  # how entries are packed; None keeps their dtype
    store: Any = None  # the `Store` that keeps all entries between turns, if any
    is_compressed: bool = False  # entries were evicted or will be, or tokens read only some
    converts_to_save: bool = False  # `saved_form` is another cache
    grows: bool = False  # entries are only appended: the newest tokens can be trimmed
    observes: bool = False  # it records queries: the attention class must be patched
    chooses: bool = False  # its queries choose which entries a call reads
    stacks: bool = False  # a batch keeps its entries in one array with those of other requests
    needs_layer: bool = False  # its `layer` must be set after loading; see `matching.adopt`
    # Position of the first entry that was computed by sparse attention; None if every entry saw all before it.
    sparse_from: int | None = None
    block: int = 1  # tokens that fit between two evictions
    room: float = math.inf  # tokens that fit before the next eviction
    nbytes: int
    size: Callable[[], int]
    trim: Callable[[int], int]  # drop up to `n` newest tokens, return how many; only if it `grows`
    file_nbytes: int = 0  # bytes of keys and values in files

    @property
    def recorded(self) -> Sequence[mx.array]:
        """Return recorded arrays to compute between two tokens of the answer."""
        return ()

    @property
    def n_entries(self) -> int:
        """Return the number of entries per KV head."""
        return self.size()

    @property
    def n_after_next(self) -> int:
        """Return the number of entries, or of entries read, after one more token."""
        return self.n_entries + 1

    @property
    def n_before_next(self) -> int:
        """Return how many entries before them the next tokens of a prompt read."""
        return self.n_entries

    @property
    def kv_nbytes(self) -> int:
        """Return the bytes of keys and values in memory, free rows included."""
        return self.nbytes

    @abstractmethod
    def held(self, n_queries: int = 0) -> Entries:
        """Return the entries in order of position, packed as stored, with the last `n_queries` recorded queries."""

    def stored_entries(self) -> Entries:
        """Return the entries without queries, packed as stored."""
        return self.held()

    def saved_form(self) -> Any:
        """Return a cache with the same entries that mlx-lm can save and load."""
        return self

    @property
    def in_files(self) -> bool:
        """Return whether entries are in files, except those of a running request."""
        return self.store is not None and self.store.in_files

    @property
    def sample(self) -> tuple[Stored, Stored]:
        """Return any number of stored keys and values, to compare their shapes and dtypes with a model's."""
        return self.keys, self.values  # type: ignore[attr-defined]

    def validate(self) -> str | None:
        """Return what is inconsistent in a loaded cache; None if nothing is."""
        n_rows, *other_numbers = {x.shape[2] for x in arrays(self.sample)}
        is_sound = (
            not other_numbers
            and type(self.offset) is int  # a file may say true or 1.5
            and 0 < self.n_entries <= n_rows
        )
        return None if is_sound else "has numbers that contradict each other"

    @property
    def full_nbytes(self) -> int:
        """Return the bytes of a full cache of all tokens, without eviction and packing."""
        if not self.offset:
            return 0
        first_entry = rows(self.held().plain(), 0, 1)
        return self.offset * n_bytes(first_entry)

    def restorer(self) -> Callable[[], None]:
        """Return a function that restores the cache to its present state, any number of times.

        A cache that `grows` is trimmed; other caches override this method.
        """
        assert self.grows, f"a {type(self).__name__} can't be restored"
        offset_before = self.offset

        def restore() -> None:
            self.trim(self.offset - offset_before)

        return restore


def keys_of(owner: Callable[[Any], Any]) -> Any:
    """Return a property `keys`, the key buffer of a cache's `owner`: mlx-lm's pipelines add a dependency to it."""

    def get_keys(cache: Any) -> mx.array:
        return owner(cache).keys

    def set_keys(cache: Any, keys: mx.array) -> None:
        owner(cache).keys = keys

    return property(get_keys, set_keys)


def restorer_of(cache: Any) -> Callable[[], None]:
    """Return a function that restores a cache's attributes to their present values, any number of times."""
    before = _copied(vars(cache))

    def restore() -> None:
        vars(cache).clear()
        vars(cache).update(_copied(before))

    return restore


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Copy a cache's attributes, arrays and lists included, so that later writes don't change the copies."""
    # The copy of an array shares its memory until one of the two is written to.
    return tree_map(lambda x: copy.copy(x) if isinstance(x, mx.array) else x, attributes)


def loadable(cls: type) -> type:
    """Let mlx-lm's `load_prompt_cache` find a class of this package by its name."""
    setattr(mlx_cache, cls.__name__, cls)
    return cls
