"""What the rest of the package may ask of any layer's cache."""

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
    """One layer's cache, ours or one of mlx-lm's behind `adapter.layer_cache`."""

    offset: int  # position of the next token; tokens fed so far
    quantization: Quantization | None = None  # how the entries are stored; None is plain
    store: Any = None  # where all entries are kept between turns, if they are
    is_compressed: bool = False  # entries were chosen from, or are going to be
    converts_to_save: bool = False  # `saved_form` is another cache
    grows: bool = False  # no entry is ever evicted or overwritten: the newest tokens can be trimmed
    observes: bool = False  # it records queries to come: the attention class must be patched
    chooses: bool = False  # tokens that come together choose together what they read
    stacks: bool = False  # a batch holds its entries in one array with others', a slot each, and asks where each goes
    needs_layer: bool = False  # its `layer` must be set, which no file has; see `matching.adopt`
    # Position of the first entry that was computed from few of those before it, if not all were computed from all.
    sparse_from: int | None = None
    block: int = 1  # tokens that fit in after an eviction
    room: float = math.inf  # tokens that fit in before the next eviction
    nbytes: int
    size: Callable[[], int]
    trim: Callable[[int], int]  # of a cache that grows: drop the newest tokens, and count them
    file_nbytes: int = 0  # bytes of keys and values in files

    @property
    def recorded(self) -> Sequence[mx.array]:
        """What it has recorded of queries, to be computed between two tokens of the answer."""
        return ()

    @property
    def n_entries(self) -> int:
        """Entries held per KV head."""
        return self.size()

    @property
    def n_after_next(self) -> int:
        """Entries held, or read by it, after one more token."""
        return self.n_entries + 1

    @property
    def n_before_next(self) -> int:
        """Entries that the next tokens of a prompt read, themselves not among them."""
        return self.n_entries

    @property
    def kv_nbytes(self) -> int:
        """Bytes of keys and values in memory, with the room that is kept for more."""
        return self.nbytes

    @abstractmethod
    def held(self, n_queries: int = 0) -> Entries:
        """The entries in order of position, as they are stored, with the last `n_queries` to vote, if recorded."""

    def stored_entries(self) -> Entries:
        """The entries without queries, quantised ones as they are."""
        return self.held()

    def saved_form(self) -> Any:
        """A cache that mlx-lm saves and loads, with the same entries."""
        return self

    @property
    def in_files(self) -> bool:
        """Whether the entries are in files, all but those of a request under way."""
        return self.store is not None and self.store.in_files

    @property
    def sample(self) -> tuple[Stored, Stored]:
        """Keys and values as they are stored, any number of them, to be compared with those of a model."""
        return self.keys, self.values  # type: ignore[attr-defined]

    def validate(self) -> str | None:
        """What does not fit together in a cache from a file; None if all does."""
        least, *more = {x.shape[2] for x in arrays(self.sample)}
        if more or type(self.offset) is not int or not 0 < self.n_entries <= least:
            return "has numbers that contradict each other"
        return None

    @property
    def full_nbytes(self) -> int:
        """Bytes of all the tokens' entries, had none been dropped or quantised."""
        return self.offset * n_bytes(rows(self.held().plain(), 0, 1)) if self.offset else 0

    def restorer(self) -> Callable[[], None]:
        """Return a function that brings the cache back to what it is now, as often as it is called.

        A cache that only grows is trimmed; any other has a function of its own, which restores a copy.
        """
        assert self.grows, f"a {type(self).__name__} can't be restored"
        n = self.offset

        def restore() -> None:
            self.trim(self.offset - n)

        return restore


def keys_of(owner: Callable[[Any], Any]) -> Any:
    """A property: the newest entries' buffer of a cache's `owner`, which mlx-lm lets wait for what a pipeline sends."""

    def wait(cache: Any, keys: mx.array) -> None:
        owner(cache).keys = keys

    return property(lambda cache: owner(cache).keys, wait)


def restorer_of(cache: Any) -> Callable[[], None]:
    """Return a function that brings a cache's attributes back to what they are now, as often as it is called."""
    before = _copied(vars(cache))

    def restore() -> None:
        vars(cache).clear()
        vars(cache).update(_copied(before))

    return restore


def _copied(attributes: dict[str, Any]) -> dict[str, Any]:
    """Copy a cache's attributes, with arrays and lists of their own: later writes leave the copies alone."""
    # The copy of an array shares its memory until one of the two is written to.
    return tree_map(lambda x: copy.copy(x) if isinstance(x, mx.array) else x, attributes)


def loadable(cls: type) -> type:
    """Let mlx-lm's `load_prompt_cache` find a class of ours by its name."""
    setattr(mlx_cache, cls.__name__, cls)
    return cls
