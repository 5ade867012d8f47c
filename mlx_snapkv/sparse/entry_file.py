"""Files for a layer's keys, values, and arrays computed from the keys. They are read with `numpy.memmap`."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import tempfile
import weakref
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..entries.quantization import Stored, flat_arrays
from ..errors import EntryFileError
from ..paths import refusing


@dataclass(frozen=True)
class Layout:
    """The layout of a file, in which each token has one row per KV head."""

    heads: tuple[int, ...]  # (B, n_kv_heads)
    # Dtype and width of each part of a row. A plain row has one part. A quantised row has several, such as codes and
    # scales.
    parts: tuple[tuple[mx.Dtype, int], ...]

    @classmethod
    def of(cls, stored: Stored) -> Layout:
        """Return the layout for rows `(B, n_kv_heads, n, ...)`, plain or quantised."""
        arrays = flat_arrays(stored)
        B, H, _, _ = arrays[0].shape
        return cls(heads=(B, H), parts=tuple((array.dtype, array.shape[-1]) for array in arrays))

    @property
    def row_bytes(self) -> int:
        """Return the size in bytes of a row, which holds one token's numbers for one head."""
        return sum(dtype.size * width for dtype, width in self.parts)

    @property
    def token_bytes(self) -> int:
        """Return the size in bytes of a token's rows for all heads."""
        return math.prod(self.heads) * self.row_bytes

    def to_bytes(self, stored: Stored) -> memoryview:
        """Convert rows `(B, n_kv_heads, n, ...)` to bytes for the file."""
        token_major = [array.transpose(2, 0, 1, 3) for array in flat_arrays(stored)]
        byte_arrays = [mx.contiguous(array).view(mx.uint8) for array in token_major]
        return np.asarray(mx.concatenate(byte_arrays, axis=-1)).data.cast("B")

    def from_bytes(self, items: np.ndarray) -> Stored:
        """Convert items `(B, n_kv_heads, n)` to rows `(B, n_kv_heads, n, ...)`. Each item is the bytes of one row."""
        item_bytes = np.ascontiguousarray(items).view(np.uint8)
        rows_as_bytes = mx.array(item_bytes.reshape(*items.shape, self.row_bytes))
        part_sizes = [dtype.size * width for dtype, width in self.parts]
        part_edges = np.cumsum(part_sizes)[:-1].tolist()
        arrays: list[mx.array] = []
        parts_as_bytes = mx.split(rows_as_bytes, part_edges, axis=-1)
        for part_as_bytes, (dtype, _width) in zip(parts_as_bytes, self.parts):
            arrays.append(mx.contiguous(part_as_bytes).view(dtype))
        is_plain = len(arrays) == 1
        return arrays[0] if is_plain else tuple(arrays)


class EntryFile:
    """An open file with a layer's rows. It is closed when this object is deleted.

    Attributes:
        n_rows: number of rows per KV head: one for each token, or for each page if the file contains page means.
        is_shared: whether a store and its copy both use the file. If so, the file must not be truncated.
    """

    path: Path | None = None  # only set for a saved prompt's file, which never changes
    is_shared = False
    _map: Any = None

    def __init__(self, layout: Layout, file: Any):
        """Use an open file, which must be empty or have this layout."""
        self.layout = layout
        self.n_rows = 0
        self._file = file
        weakref.finalize(self, self._file.close)

    def append(self, stored: Stored) -> None:
        """Append rows. Raises: OSError: writing failed; EntryFileError: earlier rows are missing."""
        data_start = self.n_rows * self.layout.token_bytes
        # Without this check, the system would fill in missing rows with zeros.
        self._require_size(data_start)
        data = self.layout.to_bytes(stored)
        write_at(self._file, data, data_start)
        self.n_rows += len(data) // self.layout.token_bytes

    def truncate(self, n: int) -> None:
        """Drop everything after the first `n` rows of each KV head, including incomplete rows."""
        self.n_rows = n
        new_size = n * self.layout.token_bytes
        # If this fails, the leftover bytes at the end are harmless.
        with contextlib.suppress(OSError):
            if self._file_size > new_size:
                os.ftruncate(self._file.fileno(), new_size)

    def read(self, start: int, stop: int) -> Stored:
        """Return the rows of tokens `[start, stop)`."""
        rows = self._map_rows(np.arange(start, stop))[start:stop]
        items = rows.transpose(1, 2, 0)  # (B, n_kv_heads, n)
        return self.layout.from_bytes(items)

    def gather(self, positions: np.ndarray) -> Stored:
        """Return the rows at `positions` `(B, n_kv_heads, n)`."""
        B, H = self.layout.heads
        # Indices of batch elements and heads, in shapes that broadcast with `positions`.
        batch_indices, head_indices = np.ogrid[:B, :H]
        rows = self._map_rows(positions)
        items = rows[positions, batch_indices[..., None], head_indices[..., None]]
        return self.layout.from_bytes(items)

    @property
    def _file_size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def _map_rows(self, positions: np.ndarray) -> np.ndarray:
        """Check that the rows at `positions` exist, and map the file as items `(n, B, n_kv_heads)`, one per row.

        Raises: EntryFileError: the file is too short, or can't be mapped.
        """
        n_needed = int(positions.max(initial=0)) + 1
        self._require_size(n_needed * self.layout.token_bytes)
        is_map_too_short = self._map is None or len(self._map) < n_needed
        if is_map_too_short:  # not mapped yet, or the file has grown
            row_dtype = np.dtype((np.void, self.layout.row_bytes))
            n_in_file = self._file_size // self.layout.token_bytes
            shape = n_in_file, *self.layout.heads
            try:
                self._map = np.asarray(np.memmap(self._file, row_dtype, "r", shape=shape))
            except OSError as error:
                raise EntryFileError(f"entries kept in a file can't be read: {error}") from error
        return self._map

    def _require_size(self, n_bytes: int) -> None:
        """Check that the file has at least `n_bytes`. Reading a memory map past the end of the file kills the process.

        Raises: EntryFileError: the file is too short.
        """
        file_size = self._file_size
        if file_size < n_bytes:
            reason = f"it should have {n_bytes:,} bytes and has {file_size:,}"
            raise EntryFileError(f"entries kept in a file can't be read: {reason}")


class SavedFile(EntryFile):
    """A saved prompt's file. It never changes, and the checksum of each piece is verified when the piece is first read.

    Args:
        path: path of the saved file.
        layout: layout of the rows.
        n_rows: number of tokens.
        checksums: CRC-32 of each piece of the file, uint32.
        piece: number of tokens per piece. The last piece may be shorter.

    Raises: SnapKVError: the file can't be opened, or has the wrong size.
    """

    def __init__(self, path: Path, layout: Layout, n_rows: int, checksums: np.ndarray, piece: int):
        """Open the file, and check its size."""
        self.path = path
        with refusing(f"{path} can't be read"):
            super().__init__(layout, path.open("rb", buffering=0))
        self.n_rows = n_rows
        self._checksums = checksums
        self._piece_size = piece
        self._is_unchecked = np.ones(len(checksums), np.bool_)  # one flag per piece
        self._require_size(n_rows * layout.token_bytes)

    def _map_rows(self, positions: np.ndarray) -> np.ndarray:
        """Map the file, and verify any pieces that contain `positions` and have not been verified yet."""
        rows = super()._map_rows(positions)
        pieces_to_read = positions // self._piece_size
        unchecked_pieces = np.unique(pieces_to_read[self._is_unchecked[pieces_to_read]])
        if unchecked_pieces.size:
            self._verify_checksums(rows, unchecked_pieces)
        return rows

    def _verify_checksums(self, rows: np.ndarray, pieces: np.ndarray) -> None:
        """Verify the checksums of the given pieces. Raises: EntryFileError: a checksum does not match."""

        def checksum(piece: int) -> int:
            piece_start = piece * self._piece_size
            piece_rows: Any = rows[piece_start : piece_start + self._piece_size]
            return zlib.crc32(piece_rows.view(np.uint8))

        with ThreadPoolExecutor(os.cpu_count()) as threads:
            checksums = list(threads.map(checksum, pieces.tolist()))
        is_intact = self._checksums[pieces] == checksums
        self._is_unchecked[pieces[is_intact]] = False
        if not is_intact.all():
            first_damaged_piece = pieces[~is_intact][0]
            damage_start = first_damaged_piece * self._piece_size * self.layout.token_bytes
            raise EntryFileError(
                f"{self.path} is damaged: a checksum does not match from byte {damage_start:,} on; "
                "put back the file that was saved, or save the prompt again",
                self.path,
            )

    def _require_size(self, n_bytes: int) -> None:
        """Check that the file has exactly the size of `n_rows` tokens. Raises: EntryFileError: the size differs."""
        file_size = self._file_size
        expected_size = self.n_rows * self.layout.token_bytes
        if file_size != expected_size:
            reason = f"it should have {expected_size:,} bytes and has {file_size:,}"
            raise EntryFileError(f"{self.path} is damaged: {reason}", self.path)


class SpillFile:
    """A temporary file for rows that don't stay in memory, such as an index's codes."""

    def __init__(self, folder: str | None = None) -> None:
        """Store the folder. The file itself is created by the first `append`."""
        self._folder = folder  # None means TMPDIR
        self._file: EntryFile | None = None

    def append(self, stored: Stored) -> Callable[[], Stored]:
        """Append rows, and return a function that reads them. Raises: EntryFileError: the file can't be written."""
        try:
            if self._file is None:
                self._file = EntryFile(Layout.of(stored), temporary_file(self._folder))
            file = self._file
            first_row = file.n_rows
            file.append(stored)
        except OSError as error:
            raise write_error(error, self._folder) from error
        return partial(file.read, first_row, file.n_rows)


def temporary_file(folder: str | None) -> Any:
    """Create an unnamed temporary file in `folder`, or in TMPDIR if `folder` is None. Raises: OSError."""
    return tempfile.TemporaryFile(prefix="mlx-snapkv-", buffering=0, dir=folder)


def write_at(file: Any, data: memoryview, start: int) -> None:
    """Write bytes at offset `start`. Raises: OSError."""
    while data:
        n_written = os.pwrite(file.fileno(), data, start)
        data = data[n_written:]
        start += n_written


def write_error(error: OSError, folder: str | None) -> EntryFileError:
    """Build the error for a file that can't be created or written in `folder`."""
    has_too_many_open_files = error.errno == errno.EMFILE
    if has_too_many_open_files:
        reason_and_remedy = f"{error.strerror}; run ulimit -n 4096 first"
    else:
        reason = error.strerror or error
        reason_and_remedy = f"{reason}; set TMPDIR or --store-dir to a folder with enough space"
    return EntryFileError(
        f"entries can't be kept in a file in {folder or tempfile.gettempdir()}: {reason_and_remedy}, "
        "or use another store"
    )
