"""A layer's entries in files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np

from ..entries.entries import Entries
from ..entries.quantization import Quantization
from .entry_file import SavedFile
from .file_parts import FixedPart, GrowingPart
from .row_bytes import RowBytes
from .sources import Chain, joined


class FileStore(Chain[FixedPart]):
    """Entries in files of keys and of values, token after token, that are read through memory maps.

    A copy shares the files with what it is a copy of, and any number of processes may share those that were saved:
    what each is given from then on goes to nameless files of its own, and what it takes back stays with the others.

    Args:
        quantization: how entries are quantised, each by itself; None is not at all.
        parts: entries to begin with.
    """

    def __init__(self, quantization: Quantization | None = None, parts: Sequence[FixedPart] = ()):
        self.quantization = quantization
        super().__init__([*parts, GrowingPart(quantization)])

    @property
    def _growing(self) -> GrowingPart:
        return self._sources[-1]  # type: ignore[return-value]  # the last one is

    def append(self, keys: mx.array, values: mx.array) -> None:
        self._growing.append(keys, values)

    def flush(self) -> None:
        self._growing.wait()

    def read_keys(self, start: int, stop: int) -> mx.array:
        self.flush()
        return super().read_keys(start, stop)

    def gather(self, places: mx.array) -> tuple[mx.array, mx.array]:
        self.flush()
        return super().gather(places)

    def entries(self) -> tuple[mx.array, mx.array]:
        self.flush()
        keys, values = zip(*(part.entries() for part, _, _ in self._spans()))
        return joined(keys), joined(values)

    def data(self, start: int, stop: int) -> list[np.ndarray]:
        self.flush()
        found = [part.data(a, b) for part, a, b in self._within(start, stop)]
        return found[0] if len(found) == 1 else [np.concatenate(rows) for rows in zip(*found)]

    def as_cache(self) -> None:
        return None

    def take(self, entries: Entries) -> bool:
        if entries.quantization == self.quantization:
            self._growing.append_stored(entries.stored_keys, entries.stored_values)
        elif self.quantization is None:
            self.append(*entries.plain())
        else:
            return False
        return True

    def truncate(self, n: int) -> None:
        growing = self._growing
        n_fixed = self.n_entries - growing.n_entries
        growing.truncate(max(0, n - n_fixed))
        if n < n_fixed:
            firsts = [part.first(max(0, n - first)) for part, first, _ in self._spans()]
            self._sources = [*(part for part in firsts if part.n_entries), growing]

    def __deepcopy__(self, memo: dict) -> FileStore:
        self.flush()
        growing = self._growing
        if growing.n_entries:
            part = FixedPart(growing.files, growing.n_entries)
            self._sources[-1:] = [part, GrowingPart(self.quantization)]
        return FileStore(self.quantization, self._sources[:-1])

    @property
    def layouts(self) -> list[RowBytes]:
        return [file.layout for file in self._sources[0].files]

    def reads(self, path: Path) -> bool:
        """Whether some of the entries are in the saved file of that name."""
        files = (file for part in self._sources for file in part.files)
        return any(isinstance(file, SavedFile) and file.path == path for file in files)

    @property
    def nbytes(self) -> int:
        return 0

    @property
    def file_nbytes(self) -> int:
        return self.n_entries * sum(layout.token for layout in self.layouts)

    @property
    def entry_bytes(self) -> int:
        return sum(layout.token_as_read for layout in self.layouts)
