"""A store that keeps a layer's keys and values in two files, and reads them through `numpy.memmap`."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import tempfile
import weakref
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...entries.entries import Entries
from ...entries.quantization import Quantization, Stored, flat_arrays
from ...errors import EntryFileError
from ...paths import refusing
from .base import EntryView, JoinedView, Store


@dataclass(frozen=True)
class Layout:
    """The layout of a file: each token has one row per head, for `heads` of shape `(B, n_kv_heads)`."""

    heads: tuple[int, ...]
    # Dtype and width of each part of a row: one part if plain, or the values, scales and biases of quantised entries.
    parts: tuple[tuple[mx.Dtype, int], ...]

    @classmethod
    def of(cls, stored: Stored) -> Layout:
        """Return the layout for one layer's keys or values, plain or quantised."""
        parts = flat_arrays(stored)
        return cls(parts[0].shape[:2], tuple((x.dtype, x.shape[-1]) for x in parts))

    @property
    def row(self) -> int:
        """Return the size of a row in bytes. A row is one token of one head."""
        return sum(dtype.size * width for dtype, width in self.parts)

    @property
    def token(self) -> int:
        """Return the size in bytes of a token's rows for all heads."""
        return math.prod(self.heads) * self.row

    def to_bytes(self, stored: Stored) -> memoryview:
        """Convert rows `(B, n_kv_heads, n, ...)` to bytes for the file."""
        parts = [mx.contiguous(x.transpose(2, 0, 1, 3)).view(mx.uint8) for x in flat_arrays(stored)]
        return np.asarray(mx.concatenate(parts, axis=-1)).data.cast("B")

    def from_bytes(self, items: np.ndarray) -> Stored:
        """Convert the file's items `(B, n_kv_heads, n)` to rows `(B, n_kv_heads, n, ...)`."""
        whole = mx.array(np.ascontiguousarray(items).view(np.uint8).reshape(*items.shape, self.row))
        edges = np.cumsum([dtype.size * width for dtype, width in self.parts])[:-1].tolist()
        split = zip(mx.split(whole, edges, axis=-1), self.parts)
        parts = tuple(mx.contiguous(x).view(dtype) for x, (dtype, _) in split)
        return parts[0] if len(parts) == 1 else parts


class EntryFile:
    """An open file with a layer's keys or values, which is closed when this object is deleted.

    Attributes:
        n_rows: number of tokens in the file.
        is_shared: whether copies of a store use the file. A shared file must not be truncated.
    """

    path: Path | None = None  # set if the file belongs to a saved prompt, and so never changes
    is_shared = False
    _map: Any = None

    def __init__(self, layout: Layout, file: Any):
        """Use an open file, which must be empty or have this layout."""
        self.layout = layout
        self.n_rows = 0
        self._file = file
        weakref.finalize(self, self._file.close)

    def append(self, stored: Stored) -> None:
        """Append rows. Raises: OSError; EntryFileError: earlier rows are missing."""
        start = self.n_rows * self.layout.token
        self._require(start)  # or the system would fill the gap with zeros
        data = self.layout.to_bytes(stored)
        write_at(self._file, data, start)
        self.n_rows += len(data) // self.layout.token

    def cut(self, n: int) -> None:
        """Drop everything after the first `n` rows, including incomplete rows."""
        self.n_rows = n
        size = n * self.layout.token
        with contextlib.suppress(OSError):
            if os.fstat(self._file.fileno()).st_size > size:
                os.ftruncate(self._file.fileno(), size)

    def read(self, start: int, stop: int) -> Stored:
        """Return the rows of tokens `[start, stop)`."""
        rows = self._rows(np.arange(start, stop))[start:stop]
        return self.layout.from_bytes(rows.transpose(1, 2, 0))

    def gather(self, positions: np.ndarray) -> Stored:
        """Return the rows at `positions` `(B, n_kv_heads, n)`."""
        B, H = self.layout.heads
        batch, head = np.ogrid[:B, :H]
        rows = self._rows(positions)
        return self.layout.from_bytes(rows[positions, batch[..., None], head[..., None]])

    def _rows(self, positions: np.ndarray) -> np.ndarray:
        """Check that the rows at `positions` exist, and map the file as items `(n, B, n_kv_heads)`, one per row."""
        n = int(positions.max(initial=0)) + 1
        self._require(n * self.layout.token)
        if self._map is None or len(self._map) < n:  # the file has grown
            row = np.dtype((np.void, self.layout.row))
            shape = os.fstat(self._file.fileno()).st_size // self.layout.token, *self.layout.heads
            try:
                self._map = np.asarray(np.memmap(self._file, row, "r", shape=shape))
            except OSError as error:
                raise EntryFileError(f"entries kept in a file can't be read: {error}") from error
        return self._map

    def _require(self, n_bytes: int) -> None:
        """Check that the file has at least `n_bytes`. Reading a memory map past the end of the file kills the process.

        Raises: EntryFileError: the file is too short.
        """
        if (size := os.fstat(self._file.fileno()).st_size) < n_bytes:
            why = f"it should have {n_bytes:,} bytes and has {size:,}"
            raise EntryFileError(f"entries kept in a file can't be read: {why}")


class SavedFile(EntryFile):
    """A saved prompt's file. It never changes, and the checksum of each piece is verified when it is first read.

    Args:
        path: path of the saved file.
        layout: layout of the rows.
        n_rows: number of tokens.
        checksums: CRC-32 of each piece of `piece` tokens, uint32. The last piece may be shorter.
        piece: number of tokens per piece.

    Raises: SnapKVError: the file can't be opened, or has the wrong size.
    """

    def __init__(self, path: Path, layout: Layout, n_rows: int, checksums: np.ndarray, piece: int):
        """Open the file, and check its size."""
        self.path = path
        with refusing(f"{path} can't be read"):
            super().__init__(layout, path.open("rb", buffering=0))
        self.n_rows = n_rows
        self._checksums = checksums
        self._piece = piece
        self._unchecked = np.ones(len(checksums), np.bool_)  # one flag per piece
        self._require(n_rows * layout.token)

    def _rows(self, positions: np.ndarray) -> np.ndarray:
        """Map the file, and verify the checksums of pieces that have not been read before."""
        rows = super()._rows(positions)
        pieces = positions // self._piece
        pieces = np.unique(pieces[self._unchecked[pieces]])
        if pieces.size:
            parts = (rows[i * self._piece : (i + 1) * self._piece] for i in pieces.tolist())
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                checksums = list(threads.map(lambda part: zlib.crc32(part.view(np.uint8)), parts))
            sound = self._checksums[pieces] == checksums
            self._unchecked[pieces[sound]] = False
            if not sound.all():
                start = pieces[~sound][0] * self._piece * self.layout.token
                raise EntryFileError(
                    f"{self.path} is damaged: a checksum does not fit from byte {start:,} on; "
                    "put back the file that was saved, or save the prompt again",
                    self.path,
                )
        return rows

    def _require(self, n_bytes: int) -> None:
        size = os.fstat(self._file.fileno()).st_size
        expected = self.n_rows * self.layout.token
        if size != expected:
            why = f"it should have {expected:,} bytes and has {size:,}"
            raise EntryFileError(f"{self.path} is damaged: {why}", self.path)


class SpillFile:
    """A temporary file for rows that don't stay in memory, such as an index's codes."""

    def __init__(self, folder: str | None = None) -> None:
        """Store the folder. The file itself is created by the first `put`."""
        self._folder = folder  # None means TMPDIR
        self._file: EntryFile | None = None

    def put(self, stored: Stored) -> Callable[[], Stored]:
        """Append rows, and return a function that reads them. Raises: EntryFileError: the disk is full."""
        try:
            if self._file is None:
                self._file = EntryFile(Layout.of(stored), temporary_file(self._folder))
            file = self._file
            start = self._file.n_rows
            file.append(stored)
        except OSError as error:
            raise no_room(error, self._folder) from error
        return partial(file.read, start, file.n_rows)


@dataclass(frozen=True)
class _Part(EntryView):
    """The first `n_entries` entries of a pair of files, with keys and values."""

    files: Sequence[EntryFile]
    n_entries: int = 0
    quantization = None
    reads_allocate = True

    @property
    def may_grow(self) -> bool:
        """Return whether entries can be appended: no file is a saved one, and none continues after this part."""
        return all(file.path is None and file.n_rows == self.n_entries for file in self.files)

    def stored(self, which: int, start: int, stop: int) -> Stored:
        return self.files[which].read(start, stop)

    def gather(self, positions: mx.array) -> tuple[mx.array, ...]:
        chosen = np.array(positions)
        return tuple(file.gather(chosen) for file in self.files)  # type: ignore[misc]


class FileStore(JoinedView, Store):
    """Plain entries in files, with keys in one file and values in another.

    A copy shares its files with the original. Whichever of the two is appended to first extends the files, and the
    other one starts new files. Saved files are never extended.

    Args:
        quantization: ignored, because entries in files are plain.
        files: the saved files of keys and values that contain the first `n_entries` entries.
        n_entries: number of entries in `files`.
        first_entry: key and value of the first entry, so that they need not be read.
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
        """Start with the `n_entries` entries of saved files, if any. The first `append` creates further files."""
        self.quantization = None
        self._first_entry = first_entry
        self.folder = folder
        super().__init__([_Part(files, n_entries)] if n_entries else [])

    def make_spill(self) -> SpillFile:
        """Create a spill file for rows that are computed from the entries."""
        return SpillFile(self.folder)

    def append(self, entries: Entries) -> None:
        """Append entries, starting new files if the last ones can't grow. An error leaves the store unchanged."""
        new = entries.with_quantization(None)
        stored = new.stored_keys, new.stored_values
        earlier_parts = self._parts
        part = None
        if self._parts and self._parts[-1].may_grow:
            *earlier_parts, part = self._parts
        try:
            if part is None:
                part = _Part([EntryFile(Layout.of(x), temporary_file(self.folder)) for x in stored])
            for file, x in zip(part.files, stored):
                file.append(x)
        except (OSError, EntryFileError) as error:
            if part is not None:
                for file in part.files:
                    file.cut(part.n_entries)
            if isinstance(error, OSError):
                raise no_room(error, self.folder) from error
            raise
        self._parts = [*earlier_parts, replace(part, n_entries=part.n_entries + len(new))]

    def truncate(self, n: int) -> None:
        """Drop all but the first `n` entries. Files that belong to a copy or a saved prompt are not truncated."""
        while self.n_entries > n:
            part = self._parts.pop()
            if (left := n - self.n_entries) <= 0:
                continue
            self._parts.append(replace(part, n_entries=left))
            for file in part.files:
                if file.path is None and not file.is_shared:
                    file.cut(left)

    def __deepcopy__(self, memo: dict) -> FileStore:
        """Return a store that shares the files. Shared files are no longer truncated."""
        other = FileStore(first_entry=self._first_entry, folder=self.folder)
        other._parts = list(self._parts)
        for file in (file for part in self._parts for file in part.files):
            file.is_shared = True
        return other

    @property
    def first_entry(self) -> tuple[mx.array, mx.array] | None:  # type: ignore[override]
        """Return the first entry's key and value, which may be read from files, or None if the store is empty."""
        if self._first_entry is None and self.n_entries:
            return self.entries(0, 1)
        return self._first_entry

    def reads(self, path: Path) -> bool:
        """Return whether the store reads the saved file at `path`."""
        return any(file.path == path for part in self._parts for file in part.files)

    @property
    def file_nbytes(self) -> int:  # type: ignore[override]
        """Return the size in bytes of the entries in all files."""
        return sum(
            file.layout.token * part.n_entries for part in self._parts for file in part.files
        )


def temporary_file(folder: str | None) -> Any:
    """Create an unnamed temporary file in `folder`, or in TMPDIR if it is None. Raises: OSError."""
    return tempfile.TemporaryFile(prefix="mlx-snapkv-", buffering=0, dir=folder)


def write_at(file: Any, data: memoryview, start: int) -> None:
    """Write bytes at offset `start`. Raises: OSError."""
    while data:
        n = os.pwrite(file.fileno(), data, start)
        data = data[n:]
        start = start + n


def no_room(error: OSError, folder: str | None) -> EntryFileError:
    """Build the error for a file that can't be created or written in `folder`."""
    why = f"{error.strerror or error}; set TMPDIR or --store-dir to a folder with room"
    if error.errno == errno.EMFILE:
        why = f"{error.strerror}; run ulimit -n 4096 before it"
    return EntryFileError(
        f"entries can't be kept in a file in {folder or tempfile.gettempdir()}: {why}, or use another store"
    )
