"""A layer's entries in files that were saved, and what came since."""

import mlx.core as mx
import numpy as np

from ..entries.entries import Entries
from .entry_file import SavedFile
from .file_store import FileStore
from .row_bytes import RowBytes
from .sources import Chain


class SavedStore(Chain):
    """Entries in two saved files, which stay as they are, and behind them those of a `FileStore`.

    Any number of processes may ask the same files.

    Args:
        files: of keys and of values.
        n_entries: what they hold.
    """

    def __init__(self, files: list[SavedFile], n_entries: int):
        self.quantization = files[0].layout.quantization
        self._saved = _Saved(files, n_entries)
        self._since = FileStore(self.quantization)
        super().__init__([self._saved, self._since])

    def append(self, keys: mx.array, values: mx.array) -> None:
        self._since.append(keys, values)

    def flush(self) -> None:
        self._since.flush()

    def entries(self) -> tuple[mx.array, mx.array]:
        keys, values = (
            layout.unpacked(data.transpose(1, 2, 0, 3))
            for layout, data in zip(self.layouts, self.data(0, self.n_entries))
        )
        return keys, values

    def as_cache(self) -> None:
        return None

    def take(self, entries: Entries) -> bool:
        return False

    def truncate(self, n: int) -> None:
        self._since.truncate(max(0, n - self._saved.n_entries))
        self._saved.n_entries = min(n, self._saved.n_entries)

    @property
    def layouts(self) -> list[RowBytes]:
        return [file.layout for file in self._saved.files]

    def data(self, start: int, stop: int) -> list[np.ndarray]:
        n = self._saved.n_entries
        parts = []
        if start < n:
            parts.append([file.data(start, min(stop, n)) for file in self._saved.files])
        if stop > n:
            parts.append(self._since.data(max(0, start - n), stop - n))
        return [np.concatenate(rows) for rows in zip(*parts)]

    @property
    def nbytes(self) -> int:
        return 0

    @property
    def file_nbytes(self) -> int:
        return self.n_entries * sum(layout.token for layout in self.layouts)

    @property
    def entry_bytes(self) -> int:
        return sum(layout.token_as_read for layout in self.layouts)


class _Saved:
    """The first `n_entries` of two saved files."""

    waits = True

    def __init__(self, files: list[SavedFile], n_entries: int):
        self.files, self.n_entries = files, n_entries

    def read_keys(self, start: int, stop: int) -> mx.array:
        return self.files[0].read(start, stop)

    def gather(self, places: mx.array) -> tuple[mx.array, mx.array]:
        chosen = np.array(places)
        keys, values = (file.gather(chosen) for file in self.files)
        return keys, values
