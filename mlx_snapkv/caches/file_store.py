"""A layer's entries in files, which are read through NumPy's memory maps."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
import weakref
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..entries.entries import Entries
from ..entries.quantization import Quantization, Stored, arrays, unpack
from ..errors import EntryFileError
from ..paths import refusing
from .stores import EntryView, JoinedView, Store


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

    def __init__(self, layout: Layout, file: Any = None):
        self.layout = layout
        self._file = file or tempfile.TemporaryFile(prefix="mlx-snapkv-", buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._file.close)

    def write(self, stored: Stored, at: int) -> None:
        """Write rows from entry `at` on. Raises: OSError; EntryFileError: those before it are gone."""
        data, start = self.layout.to_bytes(stored), at * self.layout.token
        if (
            found := os.fstat(self._file.fileno()).st_size
        ) < start:  # the system would fill up with zeros
            raise EntryFileError(
                f"entries kept in a file can't be read: it should have {start:,} bytes and has {found:,}"
            )
        while data:
            n = os.pwrite(self._file.fileno(), data, start)
            data, start = data[n:], start + n

    def cut(self, n: int) -> None:
        os.ftruncate(self._file.fileno(), n * self.layout.token)

    def read(self, start: int, stop: int) -> Stored:
        return self.layout.from_bytes(self._map(np.arange(start, stop))[start:].transpose(1, 2, 0))

    def gather(self, places: np.ndarray) -> Stored:
        """The rows at `places` `(B, n_kv_heads, n)`."""
        B, H = self.layout.heads
        batch, head = np.ogrid[:B, :H]
        return self.layout.from_bytes(self._map(places)[places, batch[..., None], head[..., None]])

    def _map(self, places: np.ndarray) -> np.ndarray:
        """The rows of the first entries, `(n, B, n_kv_heads)`, each one item, of which those at `places` are read."""
        row, n = np.dtype((np.void, self.layout.row)), int(places.max(initial=0)) + 1
        try:
            return np.memmap(self._file, row, "r", shape=(n, *self.layout.heads))
        except (OSError, ValueError) as error:
            raise EntryFileError(f"entries kept in a file can't be read: {error}") from error


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
            super().__init__(layout, path.open("rb", buffering=0))
        self._size, self._checksums, self._piece = n_entries * layout.token, checksums, piece
        self._is_new = np.ones(len(checksums), np.bool_)  # not compared yet
        self._require_size()

    def _map(self, places: np.ndarray) -> np.ndarray:
        self._require_size()  # a map of what is no longer there would end the process
        pieces = np.unique(places // self._piece)
        pieces = pieces[self._is_new[pieces]]
        if pieces.size:
            whole, size = np.memmap(self._file, np.uint8, "r"), self._piece * self.layout.token
            parts = (whole[i * size : (i + 1) * size].data for i in pieces.tolist())
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                sound = self._checksums[pieces] == list(threads.map(zlib.crc32, parts))
            self._is_new[pieces[sound]] = False
            if not sound.all():
                raise EntryFileError(
                    f"{self.path} is damaged: a checksum does not fit from byte {pieces[~sound][0] * size:,} on; "
                    "put back the file that was saved, or save the prompt again",
                    self.path,
                )
        return super()._map(places)

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

    def stored(self, which: int, start: int, stop: int) -> Stored:
        return self.files[which].read(start, stop)

    def gather(self, places: mx.array) -> tuple[mx.array, ...]:
        chosen = np.array(places)
        return tuple(unpack(file.gather(chosen), self.quantization) for file in self.files)


class FileStore(JoinedView, Store):
    """Entries in files of keys and of values.

    Copies share files, and processes those that were saved, the `files` of `n_entries` to begin with. What each is
    given from then on goes to files without names of its own, and what it drops stays with the others.
    """

    nbytes = 0

    def __init__(
        self,
        quantization: Quantization | None = None,
        files: Sequence[EntryFile] = (),
        n_entries: int = 0,
    ):
        self.quantization = quantization
        super().__init__([_Part(files, quantization, n_entries)] if n_entries else [])
        self._grows = False  # the last part's files are this store's alone

    def append(self, entries: Entries) -> None:
        new = entries.packed(self.quantization)
        stored = new.stored_keys, new.stored_values
        try:
            if not self._grows:
                files = [EntryFile(Layout.of(x)) for x in stored]
                self._parts.append(_Part(files, self.quantization))
                self._grows = True
            part = self._parts[-1]
            for file, x in zip(part.files, stored):
                file.write(x, part.n_entries)
        except OSError as error:
            self._cut()
            raise EntryFileError(
                f"entries can't be kept in a file in {tempfile.gettempdir()}: {error.strerror or error}; "
                "set TMPDIR or --store-dir to a folder with room, or use another memory"
            ) from error
        self._parts[-1] = replace(part, n_entries=part.n_entries + len(new))

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
        other = FileStore(self.quantization)
        other._parts = list(self._parts)
        return other

    def reads(self, path: Path) -> bool:
        """Whether some of the entries are in the saved file of that name."""
        files = (file for part in self._parts for file in part.files)
        return any(isinstance(file, SavedFile) and file.path == path for file in files)

    @property
    def file_nbytes(self) -> int:  # type: ignore[override]
        return sum(
            file.layout.token * part.n_entries for part in self._parts for file in part.files
        )
