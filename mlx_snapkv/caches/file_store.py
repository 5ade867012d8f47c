"""A layer's entries in files."""

import math
import os
import tempfile
import weakref
from typing import Any

import mlx.core as mx
import numpy as np

from ..entries.entries import Entries
from ..errors import SnapKVError


class FileStore:
    """Entries in two files, of keys and of values, that are read through memory maps.

    The files have no names, so that their space is free again as soon as the store or the process is gone, however that
    ends. Token after token they hold `(B, n_kv_heads, head_dim)`: new entries go to the end.
    """

    waits = True

    def __init__(self) -> None:
        self.n_entries = 0
        self._files: list[_EntryFile] = []  # of keys and values, once it is known what those are

    def append(self, keys: mx.array, values: mx.array) -> None:
        if not self._files:
            self._files = [_EntryFile(rows) for rows in (keys, values)]
        try:
            for file, rows in zip(self._files, (keys, values)):
                file.write(rows, self.n_entries)
        except BaseException as error:
            self._cut()
            if not isinstance(error, OSError):
                raise
            raise SnapKVError(
                f"a conversation's entries can't be kept in a file in {tempfile.tempdir or 'a temporary folder'}: "
                f"{error.strerror or error}; set TMPDIR to a folder with room, or use another memory"
            ) from error
        self.n_entries += keys.shape[2]

    def entries(self) -> tuple[mx.array, mx.array]:
        keys, values = (file.read(0, self.n_entries) for file in self._files)
        return keys, values

    def read_keys(self, start: int, stop: int) -> mx.array:
        return self._files[0].read(start, stop)

    def gather(self, places: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = (file.gather(np.array(places)) for file in self._files)
        return keys, values

    def as_cache(self) -> None:
        return None

    def take(self, entries: Entries) -> bool:
        self.append(entries.keys, entries.values)
        return True

    def truncate(self, n: int) -> None:
        if n < self.n_entries:
            self.n_entries = n
            self._cut()

    def _cut(self) -> None:
        for file in self._files:
            file.cut(self.n_entries)

    @property
    def nbytes(self) -> int:
        return 0

    @property
    def file_nbytes(self) -> int:
        return self.n_entries * self.entry_bytes

    @property
    def entry_bytes(self) -> int:
        return sum(file.entry_bytes for file in self._files)


class _EntryFile:
    """A nameless file of keys or of values.

    Args:
        like: some of them, `(B, n_kv_heads, T, head_dim)`.
    """

    def __init__(self, like: mx.array):
        B, H, _, D = like.shape
        self._heads = B, H, D
        self._dtype = like.dtype
        self._bits = np.uint16 if like.dtype.size == 2 else np.uint32  # NumPy has no bfloat16
        self._file: Any = None

    @property
    def entry_bytes(self) -> int:
        return math.prod(self._heads) * self._dtype.size

    def write(self, rows: mx.array, at: int) -> None:
        """Put rows `(B, n_kv_heads, n, head_dim)` to entry `at` and on."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="mlx-snapkv-", buffering=0)  # noqa: SIM115
            weakref.finalize(self, self._file.close)
        by_token = mx.contiguous(rows.transpose(2, 0, 1, 3)).view(mx.uint8)
        data = np.asarray(by_token).data.cast("B")
        written = 0
        while written < len(data):
            start = at * self.entry_bytes + written
            written += os.pwrite(self._file.fileno(), data[written:], start)

    def read(self, start: int, stop: int) -> mx.array:
        """The rows of entries `[start, stop)`."""
        by_token = self._map(stop)[start:]
        return self._rows(np.ascontiguousarray(by_token.transpose(1, 2, 0, 3)))

    def gather(self, places: np.ndarray) -> mx.array:
        """The rows at `places` `(B, n_kv_heads, n)`."""
        B, H, _ = self._heads
        batch, head = np.ogrid[:B, :H]
        by_token = self._map(int(places.max()) + 1)
        return self._rows(by_token[places, batch[..., None], head[..., None]])

    def cut(self, n: int) -> None:
        """Hold the first `n` entries only."""
        if self._file is not None:
            os.ftruncate(self._file.fileno(), n * self.entry_bytes)

    def _map(self, n: int) -> np.ndarray:
        return np.memmap(self._file, self._bits, "r", shape=(n, *self._heads))

    def _rows(self, bits: np.ndarray) -> mx.array:
        return mx.array(bits).view(self._dtype)
