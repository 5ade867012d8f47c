"""What a store of a layer's entries is asked, and the registry of the kinds there are."""

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx

from ...entries.entries import Entries
from ...entries.quantization import KEYS, VALUES, Quantization
from .views import EntryView

STORES: dict[str, type["Store"]] = {}  # by name


class Store(EntryView):
    """Entries that more are appended to.

    A kind of store with a `name` is registered: `store=NAME` makes one for each layer.
    """

    name: ClassVar[str]
    bits: ClassVar[int | None] = None  # of a packed key or value; None leaves entries plain
    in_files: bool = False  # whoever saves a cache puts its entries beside the file
    folder: str | None = None  # of files to come; None is TMPDIR
    cache: Any = None  # unless in files, mlx-lm's cache that they are in, which may go on by itself
    # Keys and values of the first of entries in files, `(B, n_kv_heads, 1, head_dim)`, which a saved cache has of them
    # to show the shapes; None if there are none.
    first_entry: tuple[mx.array, mx.array] | None = None
    nbytes: int  # what they take in memory, and below, in files
    file_nbytes: int = 0

    @abstractmethod
    def __init__(self, quantization: Quantization | None = None): ...

    def __init_subclass__(cls) -> None:
        if "name" in vars(cls):
            STORES[cls.name] = cls

    @abstractmethod
    def append(self, entries: Entries) -> None:
        """Add entries, as they are if quantised the same way. Raises: SnapKVError: no space; it is then as it was."""

    @abstractmethod
    def truncate(self, n: int) -> None:
        """Hold the first `n` entries only."""

    def reads(self, path: Path) -> bool:
        """Whether some of the entries are in the saved file of that name."""
        return False

    def held(self) -> Entries:
        """All entries, as they are stored."""
        keys, values = (self.stored(which, 0, self.n_entries) for which in (KEYS, VALUES))
        return Entries(keys, values, quantization=self.quantization)
