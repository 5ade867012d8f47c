"""What the rest of the package may ask of any layer's cache."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from ..entries.entries import Entries
from ..entries.key_index import KeyIndex
from ..entries.quantization import Quantization, n_bytes, rows
from .stores import Store


@dataclass
class Mark:
    """Where a cache can be rolled back to: what it was then, and all it was before the first eviction since."""

    state: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that this alone holds."""
        return n_bytes((self.before["keys"], self.before["values"])) if self.before else 0


class LayerCache(ABC):
    """One layer's cache, ours or one of mlx-lm's behind `adapter.layer_cache`."""

    offset: int  # position of the next token; tokens fed so far
    quantization: Quantization | None = None  # how the entries are stored; None is plain
    is_compressed: bool = False  # entries were chosen from, or are going to be
    observes: bool = False  # it records queries to come: the attention class must be patched
    chooses: bool = False  # tokens that come together choose together what they read
    block: int = 1  # tokens that fit in after an eviction
    room: float = math.inf  # tokens that fit in before the next eviction
    nbytes: int
    size: Callable[[], int]
    file_nbytes: int = 0  # bytes of keys and values in files
    _mark: Mark | None = None

    @property
    def n_entries(self) -> int:
        """Entries held per KV head."""
        return self.size()

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

    @property
    def full_nbytes(self) -> int:
        """Bytes of all the tokens' entries, had none been dropped or quantised."""
        return self.offset * n_bytes(rows(self.held().plain(), 0, 1)) if self.offset else 0

    def mark(self) -> None:
        """From now on tokens can be rolled back exactly, to here; what came before stays."""
        self._mark = Mark()

    @abstractmethod
    def rollback(self, n: int) -> None:
        """Drop the newest `n` tokens. Raises: TrimError: not all can be, exactly; the cache is then as it was."""

    def commit(self) -> Mark:
        """Keep the tokens since `mark`; what `reopen` needs to roll them back all the same."""
        mark, self._mark = self._mark or Mark(), None
        return mark

    def reopen(self, mark: Mark) -> None:
        """Let the next `rollback` go to a mark that was committed, whatever was marked since."""
        self._mark = mark


def keys_of(owner: Callable[[Any], Any]) -> Any:
    """A property: the newest entries' buffer of a cache's `owner`, which mlx-lm lets wait for what a pipeline sends."""

    def wait(cache: Any, keys: mx.array) -> None:
        owner(cache).keys = keys

    return property(lambda cache: owner(cache).keys, wait)


class LosslessCache(LayerCache):
    """A layer's cache that can give back every entry it was ever fed, wherever they are."""

    store: Store  # where they are kept between turns
    # Of the keys of the first entries, as many as there were when it last grew, if there is one.
    index: KeyIndex | None = None

    @abstractmethod
    def offload(self) -> None:
        """Move the entries to the store. Raises: SnapKVError: there is no space for them; they stay in memory then."""

    @abstractmethod
    def views(self) -> list[Store]:
        """Where its entries can be read from, in order of position."""

    @abstractmethod
    def fill(self, entries: Entries) -> None:
        """Hold these entries, the first there are."""

    @abstractmethod
    def saved_form(self) -> Any:
        """A cache of mlx-lm's with the same entries, quantised ones as they are; itself if there is no such."""

    def growing_cache(self) -> Any:
        """mlx-lm's cache of all entries, none in files, to read on with; what it is fed is held here, too."""
        self.offload()
        return self.store.cache

    @property
    def file_nbytes(self) -> int:  # type: ignore[override]
        return self.store.file_nbytes

    @property
    def kv_nbytes(self) -> int:
        return self.nbytes + self.index_nbytes

    @property
    def index_nbytes(self) -> int:
        return 0 if self.index is None else self.index.nbytes
