"""A file of keys or of values, and how it is read."""

import os
import tempfile
import weakref
import zlib
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import EntryFileError, SnapKVError
from ..paths import reason
from .row_bytes import RowBytes


class EntryFile:
    """A layer's keys or values, token after token, read through memory maps."""

    def __init__(self, layout: RowBytes, file: Any = None):
        self.layout = layout
        self._file = file
        if file is not None:
            weakref.finalize(self, file.close)

    def read(self, start: int, stop: int) -> mx.array:
        """The rows of entries `[start, stop)`."""
        return self._unpacked(self._map(stop)[start:].transpose(1, 2, 0))

    def gather(self, places: np.ndarray) -> mx.array:
        """The rows at `places` `(B, n_kv_heads, n)`."""
        B, H = self.layout.heads
        batch, head = np.ogrid[:B, :H]
        by_token = self._map(int(places.max(initial=0)) + 1)
        return self._unpacked(by_token[places, batch[..., None], head[..., None]])

    def data(self, start: int, stop: int) -> np.ndarray:
        """The rows of entries `[start, stop)` as they lie there, uint8 `(stop - start, B, n_kv_heads, row)`."""
        return self._bytes(self._map(stop)[start:])

    def _map(self, n: int) -> np.ndarray:
        """The rows of the first `n` entries, `(n, B, n_kv_heads)`, each one item."""
        row = np.dtype((np.void, self.layout.row))
        try:
            return np.memmap(self._file, row, "r", shape=(n, *self.layout.heads))
        except (OSError, ValueError) as error:
            raise EntryFileError(f"{self} can't be read: {error}") from error

    def _unpacked(self, rows: np.ndarray) -> mx.array:
        return self.layout.unpacked(self._bytes(rows))

    def _bytes(self, rows: np.ndarray) -> np.ndarray:
        rows = np.ascontiguousarray(rows)
        return rows.view(np.uint8).reshape(*rows.shape, self.layout.row)

    def __str__(self) -> str:
        return "entries kept in a file"


class TemporaryFile(EntryFile):
    """A nameless file, whose space is free again as soon as this or the process is gone."""

    def write(self, rows: np.ndarray, at: int) -> None:
        """Put rows, uint8 `(n, B, n_kv_heads, row)`, to entry `at` and on."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="mlx-snapkv-", buffering=0)  # noqa: SIM115
            weakref.finalize(self, self._file.close)
        data = rows.data.cast("B")
        written = 0
        while written < len(data):
            start = at * self.layout.token + written
            written += os.pwrite(self._file.fileno(), data[written:], start)

    def cut(self, n: int) -> None:
        """Hold the first `n` entries only."""
        if self._file is not None:
            os.ftruncate(self._file.fileno(), n * self.layout.token)


class SavedFile(EntryFile):
    """A file with a name, that stays as it is: each piece's checksum is looked at when it is first read.

    Args:
        path: its name.
        n_entries: what it holds.
        checksums: uint32, CRC-32 of each `piece` bytes; the last piece may be shorter.

    Raises:
        SnapKVError: it can't be opened, or is not of that size.
    """

    def __init__(
        self,
        path: Path,
        layout: RowBytes,
        n_entries: int,
        checksums: np.ndarray,
        piece: int,
    ):
        self.path = path
        try:
            super().__init__(layout, path.open("rb", buffering=0))
        except OSError as error:
            raise SnapKVError(f"{path} can't be read: {reason(error)}") from error
        self._size = n_entries * layout.token
        self._checksums, self._piece = checksums, piece
        self._is_new = np.ones(len(checksums), np.bool_)  # not looked at yet
        self._require_size()

    def read(self, start: int, stop: int) -> mx.array:
        self._require_span(start, stop)
        return super().read(start, stop)

    def data(self, start: int, stop: int) -> np.ndarray:
        self._require_span(start, stop)
        return super().data(start, stop)

    def gather(self, places: np.ndarray) -> mx.array:
        first = np.unique(places).astype(np.int64) * self.layout.token
        last = first + self.layout.token - 1
        first, last = first // self._piece, last // self._piece
        longest = int((last - first).max(initial=0))
        self._require(np.unique([np.minimum(first + i, last) for i in range(longest + 1)]))
        return super().gather(places)

    def _require_span(self, start: int, stop: int) -> None:
        first, last = start * self.layout.token, stop * self.layout.token - 1
        self._require(np.arange(first // self._piece, last // self._piece + 1))

    def _require(self, pieces: np.ndarray) -> None:
        """Raises: EntryFileError: one of these pieces is not what was saved."""
        self._require_size()  # a map of what is no longer there would end the process
        pieces = pieces[self._is_new[pieces]]
        if not pieces.size:
            return
        whole = np.memmap(self._file, np.uint8, "r", shape=(self._size,))

        def checksum(piece: int) -> int:
            start = piece * self._piece
            return zlib.crc32(whole[start : start + self._piece].data)

        sound = self._checksums[pieces] == list(_checkers().map(checksum, pieces.tolist()))
        self._is_new[pieces[sound]] = False
        if not sound.all():
            start = pieces[~sound][0] * self._piece
            raise EntryFileError(
                f"{self} is damaged: a checksum does not fit from byte {start:,} on; put back the file that was "
                "saved, or save the prompt again",
                self.path,
            )

    def _require_size(self) -> None:
        found = os.fstat(self._file.fileno()).st_size
        if found != self._size:
            raise EntryFileError(
                f"{self} is damaged: it should have {self._size:,} bytes and has {found:,}",
                self.path,
            )

    def __str__(self) -> str:
        return str(self.path)


@cache
def _checkers() -> ThreadPoolExecutor:
    """The threads that read pieces, and count their checksums."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="mlx-snapkv-checksums")
