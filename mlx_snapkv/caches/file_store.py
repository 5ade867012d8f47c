"""A layer's entries in a file."""

from __future__ import annotations

import math
import os
import tempfile
import weakref
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..entries.entries import Entries
from ..errors import SnapKVError


class FileStore:
    """Entries in a file that is read through a memory map.

    The file has no name, so that its space is free again as soon as the store or the process is gone, however that
    ends. Token after token it holds `(B, n_kv_heads, head_dim)` keys and then values: new entries go to its end.
    """

    def __init__(self) -> None:
        self.n_entries = 0
        self._file: Any = None
        self._kinds: list[_Kind] = []  # of keys and values

    def append(self, keys: mx.array, values: mx.array) -> None:
        self._kinds = [_Kind.of(rows) for rows in (keys, values)]
        parts = [kind.to_bytes(rows) for kind, rows in zip(self._kinds, (keys, values))]
        data = np.asarray(mx.concatenate(parts, axis=1)).data.cast("B")
        try:
            self._write(data, self.file_nbytes)
        except OSError as error:
            raise SnapKVError(
                f"a conversation's entries can't be kept in a file in {tempfile.tempdir or 'a temporary folder'}: "
                f"{error.strerror or error}; set TMPDIR to a folder with room, or use another memory"
            ) from error
        self.n_entries += keys.shape[2]

    def _write(self, data: memoryview, at: int) -> None:
        """Put all of `data` into the file, or leave it as it was."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="mlx-snapkv-", buffering=0)  # noqa: SIM115
            weakref.finalize(self, self._file.close)
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._file.fileno(), data[written:], at + written)
        except BaseException:
            os.ftruncate(self._file.fileno(), at)
            raise

    def entries(self) -> tuple[mx.array, mx.array]:
        tokens = np.memmap(self._file, np.uint8, "r", shape=(self.n_entries, self.entry_bytes))
        of_keys, of_values = self._kinds
        keys = of_keys.from_bytes(tokens[:, : of_keys.entry_bytes])
        return keys, of_values.from_bytes(tokens[:, of_keys.entry_bytes :])

    def as_cache(self) -> None:
        return None

    def take(self, entries: Entries) -> bool:
        self.append(entries.keys, entries.values)
        return True

    def truncate(self, n: int) -> None:
        if n < self.n_entries:
            self.n_entries = n
            os.ftruncate(self._file.fileno(), self.file_nbytes)

    @property
    def nbytes(self) -> int:
        return 0

    @property
    def file_nbytes(self) -> int:
        return self.n_entries * self.entry_bytes

    @property
    def entry_bytes(self) -> int:
        return sum(kind.entry_bytes for kind in self._kinds)


@dataclass(frozen=True)
class _Kind:
    """What keys or values are in a file: `heads` is `(B, n_kv_heads, head_dim)`."""

    heads: tuple[int, int, int]
    dtype: mx.Dtype

    @classmethod
    def of(cls, rows: mx.array) -> _Kind:
        B, H, _, D = rows.shape
        return cls((B, H, D), rows.dtype)

    def to_bytes(self, rows: mx.array) -> mx.array:
        """uint8 `(n, entry_bytes)` of rows `(B, n_kv_heads, n, head_dim)`."""
        by_token = rows.transpose(2, 0, 1, 3).reshape(rows.shape[2], -1)
        return mx.contiguous(by_token).view(mx.uint8)

    def from_bytes(self, tokens: np.ndarray) -> mx.array:
        """The rows of uint8 `(n, entry_bytes)`."""
        bits = np.uint16 if self.dtype.size == 2 else np.uint32  # NumPy has no bfloat16
        by_token = tokens.view(bits).reshape(len(tokens), *self.heads)
        rows = mx.array(np.ascontiguousarray(by_token.transpose(1, 2, 0, 3)))
        return rows.view(self.dtype)

    @property
    def entry_bytes(self) -> int:
        return math.prod(self.heads) * self.dtype.size
