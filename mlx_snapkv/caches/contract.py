"""What the rest of the package may ask of any layer's cache."""

import math
from abc import ABC, abstractmethod
from typing import Any

from ..entries.entries import Entries
from ..entries.quantization import Quantization, n_bytes, rows
from .stores import EntryView


class Mark(dict[str, Any]):
    """A cache's attributes that bring back a mark which was committed; see `LayerCache.reopen`."""

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that this alone holds."""
        before = self.get("_before")
        return n_bytes((before["keys"], before["values"])) if isinstance(before, dict) else 0


class LayerCache(ABC):
    """One layer's cache, ours or one of mlx-lm's behind `adapter.layer_cache`.

    Attributes:
        offset: position of the next token; tokens fed so far.
        quantization: how the entries are stored; None is plain.
        is_compressed: entries were chosen from, or are going to be.
        observes: it records the queries of the tokens to come, so the attention class must be patched.
        block: tokens that fit in after an eviction.
    """

    offset: int
    quantization: Quantization | None = None
    is_compressed: bool = False
    observes: bool = False
    block: int = 1

    @abstractmethod
    def held(self, n_queries: int = 0) -> Entries:
        """The entries in order of position, as they are stored; the cache stays as it is.

        Args:
            n_queries: how many of the last queries, if they were recorded, are to vote for them.
        """

    @property
    @abstractmethod
    def n_entries(self) -> int:
        """Entries held per KV head."""

    @property
    @abstractmethod
    def kv_nbytes(self) -> int:
        """Bytes of keys and values in memory, with the room that is kept for more."""

    @property
    def file_nbytes(self) -> int:
        """Bytes of keys and values in files."""
        return 0

    @property
    def full_nbytes(self) -> int:
        """Bytes of all the tokens' entries, had none been dropped or quantised."""
        entries = self.held()
        return self.offset * n_bytes(rows(entries.plain(), 0, 1))

    @property
    def room(self) -> float:
        """Tokens that fit in before the next eviction; infinite if there will be none."""
        return math.inf

    def mark(self) -> None:  # noqa: B027
        """From now on tokens can be rolled back exactly, to here; what came before stays."""

    @abstractmethod
    def rollback(self, n: int) -> None:
        """Drop the newest `n` tokens.

        Raises:
            TrimError: `n` is more than can be rolled back exactly; the cache is then as it was.
        """

    def commit(self) -> Mark:
        """Keep the tokens since `mark`; what `reopen` needs to roll them back all the same."""
        return Mark()

    def reopen(self, mark: Mark) -> None:
        """Let the next `rollback` go to a mark that was committed, whatever was marked since."""
        vars(self).update(mark)

    def validate(self, like: Any) -> str | None:
        """What is wrong with a cache that came from a file, in a few words; None if it is sound.

        Args:
            like: mlx-lm's plain cache of the same layer, after one token.
        """
        return None


class LosslessCache(ABC):
    """A layer's cache that can give back every entry it was ever fed, wherever they are."""

    @abstractmethod
    def offload(self) -> None:
        """Move the entries to where they are kept between turns.

        Raises:
            SnapKVError: there is no space for them; they stay in memory then.
        """

    @abstractmethod
    def growing_cache(self) -> Any:
        """A cache of mlx-lm's kind with all entries, to read on with; what it is fed is held here, too."""

    @abstractmethod
    def saved_form(self) -> Any:
        """A cache of mlx-lm's with the same entries, quantised ones as they are; itself if there is no such."""

    @abstractmethod
    def views(self) -> list[EntryView]:
        """Where its entries can be read from, in order of position."""

    @abstractmethod
    def fill(self, entries: Entries) -> None:
        """Hold these entries, the first there are."""
