"""A layer's entries in files, which are read through memory maps."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ...entries.entries import Entries
from ...entries.quantization import Quantization, Stored, arrays, unpack
from ...errors import EntryFileError
from ...paths import refusing
from ..file_map import file_map
from ..open_files import allow_more_files
from .base import Store
from .temporary import AsideFile, no_room, temporary_file, write_at
from .views import EntryView, JoinedView

COPIED = 8 << 20  # bytes of a file at a time
JOINED = 256 << 20  # bytes of a file that are copied to join parts, at most


@dataclass(frozen=True)
class Layout:
    """How keys or values lie in a file: token after token, rows of `heads` `(B, n_kv_heads)`."""

    heads: tuple[int, ...]
    # Dtypes and widths of the arrays that a row is stored in: itself, or packed values, scales and biases.
    parts: tuple[tuple[mx.Dtype, int], ...]

    @classmethod
    def of(cls, stored: Stored) -> Layout:
        parts = arrays(stored)
        return cls(parts[0].shape[:2], tuple((x.dtype, x.shape[-1]) for x in parts))

    @property
    def row(self) -> int:
        return sum(dtype.size * width for dtype, width in self.parts)

    @property
    def token(self) -> int:
        return math.prod(self.heads) * self.row

    def to_bytes(self, stored: Stored) -> memoryview:
        """Rows `(B, n_kv_heads, n, ...)` as they lie in the file."""
        parts = [mx.contiguous(x.transpose(2, 0, 1, 3)).view(mx.uint8) for x in arrays(stored)]
        return np.asarray(mx.concatenate(parts, axis=-1)).data.cast("B")

    def from_bytes(self, found: np.ndarray) -> Stored:
        """Rows of `(B, n_kv_heads, n)` items of a file."""
        whole = mx.array(np.ascontiguousarray(found).view(np.uint8).reshape(*found.shape, self.row))
        edges = np.cumsum([dtype.size * width for dtype, width in self.parts])[:-1].tolist()
        split = zip(mx.split(whole, edges, axis=-1), self.parts)
        parts = tuple(mx.contiguous(x).view(dtype) for x, (dtype, _) in split)
        return parts[0] if len(parts) == 1 else parts


class EntryFile:
    """A layer's keys or values in a file; by default one without a name, which goes with this."""

    path: Path | None = None  # of a file that was saved and never changes
    _map: Any = None

    def __init__(self, layout: Layout, file: Any = None):
        self.layout = layout
        self._file = file or temporary_file()
        weakref.finalize(self, self._file.close)

    def write(self, stored: Stored, at: int) -> None:
        """Write rows from entry `at` on. Raises: OSError; EntryFileError: those before it are gone."""
        data, start = self.layout.to_bytes(stored), at * self.layout.token
        self._require(start)  # the system would fill up with zeros
        write_at(self._file, data, start)

    def copy(self, other: EntryFile, n: int, at: int) -> None:
        """Write the first `n` entries of a file of the same layout from entry `at` on."""
        size, start = n * self.layout.token, at * self.layout.token
        other._require(size)
        for done in range(0, size, COPIED):
            data = os.pread(other._file.fileno(), min(COPIED, size - done), done)
            write_at(self._file, memoryview(data), start)
            start += len(data)

    def cut(self, n: int) -> None:
        os.ftruncate(self._file.fileno(), n * self.layout.token)

    def read(self, start: int, stop: int) -> Stored:
        rows = self._rows(np.arange(start, stop))[start:stop]
        return self.layout.from_bytes(rows.transpose(1, 2, 0))

    def gather(self, places: np.ndarray) -> Stored:
        """The rows at `places` `(B, n_kv_heads, n)`."""
        B, H = self.layout.heads
        batch, head = np.ogrid[:B, :H]
        rows = self._rows(places)
        return self.layout.from_bytes(rows[places, batch[..., None], head[..., None]])

    def _rows(self, places: np.ndarray) -> np.ndarray:
        """The file's first rows, `(n, B, n_kv_heads)`, each one item, of which those at `places` are read."""
        n, row = int(places.max(initial=0)) + 1, np.dtype((np.void, self.layout.row))
        self._require(n * self.layout.token)
        n_held = len(self._mapped(n * self.layout.token)) // self.layout.token
        return np.ndarray((n_held, *self.layout.heads), row, self._map)

    def _mapped(self, n_bytes: int) -> Any:
        """A map of at least so many bytes: the one there is, unless the file had fewer when that was made."""
        if self._map is None or len(self._map) < n_bytes:
            try:
                self._map = file_map(self._file.fileno())
            except OSError as error:
                raise EntryFileError(f"entries kept in a file can't be read: {error}") from error
        return self._map

    def _require(self, n_bytes: int) -> None:
        """Raises: EntryFileError: the file is shorter. A map of what is no longer there would end the process."""
        if (found := os.fstat(self._file.fileno()).st_size) < n_bytes:
            why = f"it should have {n_bytes:,} bytes and has {found:,}"
            raise EntryFileError(f"entries kept in a file can't be read: {why}")


class SavedFile(EntryFile):
    """A file with a name, which never changes; each piece's checksum is compared when it is first read.

    Args:
        n_entries: what it holds.
        checksums: uint32, CRC-32 of each `piece` entries; the last piece may be shorter.

    Raises: SnapKVError: it can't be opened, or is not of that size.
    """

    def __init__(
        self, path: Path, layout: Layout, n_entries: int, checksums: np.ndarray, piece: int
    ):
        self.path = path
        with refusing(f"{path} can't be read"):
            allow_more_files()
            super().__init__(layout, path.open("rb", buffering=0))
        self._size, self._checksums, self._piece = n_entries * layout.token, checksums, piece
        self._is_new = np.ones(len(checksums), np.bool_)  # not compared yet
        self._require_size()

    def _rows(self, places: np.ndarray) -> np.ndarray:
        self._require_size()
        pieces = np.unique(places // self._piece)
        pieces = pieces[self._is_new[pieces]]
        if pieces.size:
            whole, size = memoryview(self._mapped(self._size)), self._piece * self.layout.token
            parts = (whole[i * size : (i + 1) * size] for i in pieces.tolist())
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                sound = self._checksums[pieces] == list(threads.map(zlib.crc32, parts))
            self._is_new[pieces[sound]] = False
            if not sound.all():
                raise EntryFileError(
                    f"{self.path} is damaged: a checksum does not fit from byte {pieces[~sound][0] * size:,} on; "
                    "put back the file that was saved, or save the prompt again",
                    self.path,
                )
        return super()._rows(places)

    def _require_size(self) -> None:
        found = os.fstat(self._file.fileno()).st_size
        if found != self._size:
            why = f"it should have {self._size:,} bytes and has {found:,}"
            raise EntryFileError(f"{self.path} is damaged: {why}", self.path)


@dataclass(frozen=True)
class _Part(EntryView):
    """The first `n_entries` of a file of keys and one of values."""

    files: Sequence[Any]
    quantization: Quantization | None
    n_entries: int = 0
    waits = True

    @property
    def is_saved(self) -> bool:
        return any(file.path is not None for file in self.files)

    def stored(self, which: int, start: int, stop: int) -> Stored:
        return self.files[which].read(start, stop)

    def gather(self, places: mx.array) -> tuple[mx.array, ...]:
        chosen = np.array(places)
        return tuple(unpack(file.gather(chosen), self.quantization) for file in self.files)


class FileStore(JoinedView, Store):
    """Entries in files of keys and of values.

    Copies share files, and processes those that were saved, the `files` of `n_entries` to begin with; their
    `first_entry` may be given so that it need not be read. What each is given from then on goes to files without names
    of its own, and what it drops stays with the others.
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
        self.quantization, self._first_entry = quantization, first_entry
        self.folder = folder
        super().__init__([_Part(files, quantization, n_entries)] if n_entries else [])
        self._grows = False  # the last part's files are this store's alone

    def aside(self) -> AsideFile:
        """Return a file for rows that are derived from these entries."""
        return AsideFile(self.folder)

    def append(self, entries: Entries) -> None:
        new = entries.packed(self.quantization)
        stored = new.stored_keys, new.stored_values
        try:
            if not self._grows:
                self._begin(list(map(Layout.of, stored)))
            part = self._parts[-1]
            for file, x in zip(part.files, stored):
                file.write(x, part.n_entries)
        except OSError as error:
            self._cut()
            raise no_room(error, self.folder) from error
        self._parts[-1] = replace(part, n_entries=part.n_entries + len(new))

    def _begin(self, layouts: list[Layout]) -> None:
        """Begin files of this store's own, with copies of the last parts where each is less than twice those behind it.

        So the parts of a conversation, which gets files of its own in every turn, are as many as its length has bits,
        besides large ones, which stay as they are.
        """
        parts, first = self._parts, len(self._parts) - 1
        most = JOINED // max(layout.token for layout in layouts)
        n = parts[-1].n_entries if parts and not parts[-1].is_saved else 0
        while first > 0 and not parts[first - 1].is_saved:
            before = parts[first - 1].n_entries
            if before >= 2 * n or n + before > most:
                break
            first, n = first - 1, n + before
        joined = parts[first:] if first < len(parts) - 1 else []
        files = [EntryFile(layout, temporary_file(self.folder)) for layout in layouts]
        own, at = _Part(files, self.quantization), 0
        for part in joined:
            for file, source in zip(own.files, part.files):
                file.copy(source, part.n_entries, at)
            at += part.n_entries
        self._parts[len(parts) - len(joined) :] = [replace(own, n_entries=at)]
        self._grows = True

    def truncate(self, n: int) -> None:
        while self.n_entries > n:
            part = self._parts.pop()
            left = n - self.n_entries
            if left > 0:
                self._parts.append(replace(part, n_entries=left))
                self._cut()
            else:
                self._grows = False

    def _cut(self) -> None:
        for file in self._parts[-1].files if self._grows else ():
            with contextlib.suppress(OSError):
                file.cut(self._parts[-1].n_entries)

    def __deepcopy__(self, memo: dict) -> FileStore:
        self._grows = False
        other = FileStore(self.quantization, first_entry=self._first_entry, folder=self.folder)
        other._parts = list(self._parts)
        return other

    @property
    def first_entry(self) -> tuple[mx.array, mx.array] | None:  # type: ignore[override]
        if self._first_entry is None and self.n_entries:
            return self.entries(0, 1)
        return self._first_entry

    def reads(self, path: Path) -> bool:
        return any(file.path == path for part in self._parts for file in part.files)

    @property
    def file_nbytes(self) -> int:  # type: ignore[override]
        return sum(
            file.layout.token * part.n_entries for part in self._parts for file in part.files
        )
