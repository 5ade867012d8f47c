"""What the rest of the package may ask of any layer's cache."""

import math
from abc import ABC, abstractmethod
from typing import Any

from ..entries.entries import Entries
from ..entries.quantization import Quantization, n_bytes, rows


class LayerCache(ABC):
    """One layer's cache, ours or one of mlx-lm's behind `adapter.layer_cache`.

    Attributes:
        offset: position of the next token; tokens fed so far.
        quantization: how the entries are stored; None is plain.
        is_compressed: entries were chosen from, or are going to be.
        observes: the queries of the tokens to come are asked for, so the attention class must be patched.
        block: tokens that fit in after entries have given way.
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
        """Tokens that fit in before entries give way; infinite if none ever do."""
        return math.inf

    def mark(self) -> None:  # noqa: B027
        """Start to be able to take back, exactly, what is fed from now on; what came before stays."""

    @abstractmethod
    def rollback(self, n: int) -> None:
        """Take back the newest `n` tokens.

        Raises:
            TrimError: `n` is more than can be taken back exactly; the cache is then as it was.
        """

    def commit(self) -> None:  # noqa: B027
        """End what `mark` began: the tokens since then stay."""

    def way_back(self) -> Any:
        """What a later `rollback` to the mark needs besides; None is nothing. To be asked before `commit`."""
        return None

    def way_nbytes(self, way: Any) -> int:
        """Bytes of keys and values that `way` alone holds."""
        return 0

    def take_way_back(self, way: Any) -> None:  # noqa: B027
        """Let the next `rollback` go to the mark that `way` is of, though it was committed, and others made since."""

    def validate(self, like: Any) -> str | None:
        """What is wrong with a cache that came from a file, in a few words; None if it is sound.

        Args:
            like: mlx-lm's plain cache of the same layer, after one token.
        """
        return None

    def adopt(self, layer: Any) -> None:  # noqa: B027
        """Tell a cache that came from a file which layer of the model it serves."""
