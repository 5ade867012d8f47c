"""A store that keeps a layer's keys and values in files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import numpy as np

from ...entries.entries import Entries
from ...entries.quantization import Quantization, Stored
from ...errors import EntryFileError
from ..entry_file import EntryFile, Layout, SpillFile, temporary_file, write_error
from .base import EntryView, JoinedView, Store


@dataclass(frozen=True)
class _FilePair(EntryView):
    """The first `n_entries` entries of a pair of files, one with keys and one with values."""

    files: Sequence[EntryFile]
    n_entries: int = 0
    reads_allocate = True

    @property
    def may_grow(self) -> bool:
        """Return whether entries can be appended.

        Saved files never grow. Other files can't grow if they contain more than `n_entries` entries, because a copy of
        the store may use the additional ones.
        """
        return all(file.path is None and file.n_rows == self.n_entries for file in self.files)

    def read(self, which: int, start: int, stop: int) -> mx.array:
        return self.files[which].read(start, stop)

    def gather(self, positions: mx.array) -> tuple[mx.array, ...]:
        numpy_positions = np.array(positions)
        return tuple(file.gather(numpy_positions) for file in self.files)  # type: ignore[misc]


class FileStore(JoinedView, Store):
    """Plain entries in files, with keys in one file and values in another.

    A copy shares its files with the original. Whichever store appends entries first extends the files, and the other
    store starts new files. Saved files are never extended.

    Args:
        quantization: ignored, because entries in files are plain.
        files: the saved files of keys and values that contain the first `n_entries` entries.
        n_entries: number of entries in `files`.
        first_entry: key and value of the first entry. If None, they are read from the files when needed.
        folder: folder for new files. None means TMPDIR.
    """

    name = "file"
    in_files = True
    nbytes = 0

    def __init__(
        self,
        quantization: Quantization | None = None,
        files: Sequence[EntryFile] = (),
        n_entries: int = 0,
        first_entry: tuple[mx.array, mx.array] | None = None,
        folder: str | None = None,
    ):
        """Start with the `n_entries` entries of saved files, if any. The first `append` creates new files."""
        self._first_entry = first_entry
        self.folder = folder
        saved_pairs = [_FilePair(files, n_entries)] if n_entries else []
        super().__init__(saved_pairs)

    def make_spill(self) -> SpillFile:
        """Create a spill file for rows that are computed from the entries."""
        return SpillFile(self.folder)

    def append(self, entries: Entries) -> None:
        """Append entries, starting new files if the last ones can't grow. An error leaves the store unchanged."""
        plain_entries = entries.with_quantization(None)
        keys_and_values = plain_entries.stored_keys, plain_entries.stored_values
        earlier_pairs = self._views
        pair = None  # the pair of files to append to
        if self._views and self._views[-1].may_grow:
            *earlier_pairs, pair = self._views
        try:
            if pair is None:
                pair = self._new_file_pair(keys_and_values)
            for file, rows in zip(pair.files, keys_and_values):
                file.append(rows)
        except (OSError, EntryFileError) as error:
            if pair is not None:
                for file in pair.files:
                    file.truncate(pair.n_entries)  # remove what was written
            if isinstance(error, OSError):
                raise write_error(error, self.folder) from error
            raise
        longer_pair = replace(pair, n_entries=pair.n_entries + len(plain_entries))
        self._views = [*earlier_pairs, longer_pair]

    def _new_file_pair(self, keys_and_values: Sequence[Stored]) -> _FilePair:
        """Create empty files for keys and values. Raises: OSError."""
        layouts = [Layout.of(stored) for stored in keys_and_values]
        return _FilePair([EntryFile(layout, temporary_file(self.folder)) for layout in layouts])

    def truncate(self, n: int) -> None:
        """Drop all but the first `n` entries. Saved files, and files shared with a copy, are not truncated."""
        while self.n_entries > n:
            last_pair = self._views.pop()
            n_in_earlier_pairs = self.n_entries
            n_left_in_pair = n - n_in_earlier_pairs
            if n_left_in_pair <= 0:
                continue
            self._views.append(replace(last_pair, n_entries=n_left_in_pair))
            for file in last_pair.files:
                if file.path is None and not file.is_shared:
                    file.truncate(n_left_in_pair)
        if n == 0:
            self._first_entry = None

    def __deepcopy__(self, memo: dict) -> FileStore:
        """Return a store that shares the files. From then on, neither store truncates them."""
        other = FileStore(first_entry=self._first_entry, folder=self.folder)
        other._views = list(self._views)
        for pair in self._views:
            for file in pair.files:
                file.is_shared = True
        return other

    @property
    def first_entry(self) -> tuple[mx.array, mx.array] | None:  # type: ignore[override]
        """Return the first entry's key and value, or None if the store is empty. This may read the files."""
        if self._first_entry is None and self.n_entries:
            return self.entries(0, 1)
        return self._first_entry

    def reads(self, path: Path) -> bool:
        """Return whether the store reads the saved file at `path`."""
        return any(file.path == path for pair in self._views for file in pair.files)

    @property
    def file_nbytes(self) -> int:  # type: ignore[override]
        """Return the size in bytes of the entries in all files."""
        return sum(
            file.layout.token_bytes * pair.n_entries for pair in self._views for file in pair.files
        )
