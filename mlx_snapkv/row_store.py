"""Stores of a layer's rows: quantised in memory, or in a file."""

from __future__ import annotations

import os
import tempfile
import weakref
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import QuantizedKVCache

from .errors import SnapKVError
from .quantization import Parts, Quantization


class RowStore(Protocol):
    """A layer's rows, in order of position.

    Attributes:
        n_rows: rows held.
        nbytes, file_bytes: what they take in memory, and in a file.
        row_bytes: what one token's keys and values take when they are read; 0 before the first rows.
    """

    n_rows: int

    @property
    def nbytes(self) -> int: ...

    @property
    def file_bytes(self) -> int: ...

    @property
    def row_bytes(self) -> int: ...

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Take `(B, n_kv_heads, n, head_dim)` keys and values behind those held.

        Raises:
            SnapKVError: there is no room for them; the store is then as it was.
        """

    def rows(self) -> tuple[mx.array, mx.array]:
        """All keys and values, `(B, n_kv_heads, n_rows, head_dim)`, of the dtype in which they came."""

    def truncate(self, n: int) -> None:
        """Hold the first `n` rows only."""


class QuantizedRows:
    """Rows of fewer bits, in memory.

    Each row is quantised by itself, so that it does not matter in which portions they come.

    Attributes:
        keys, values: their parts, `(B, n_kv_heads, n_rows, ...)` each; None before the first rows.
    """

    def __init__(self, quantization: Quantization):
        self.quantization = quantization
        self.n_rows = 0
        self.keys: Parts | None = None
        self.values: Parts | None = None

    def append(self, keys: mx.array, values: mx.array) -> None:
        parts = []
        for held, new in ((self.keys, keys), (self.values, values)):
            packed = self.quantization.pack(new)
            if held is not None:
                pairs = zip(held, packed)
                packed = tuple(mx.concatenate([a, b], axis=2) for a, b in pairs)  # type: ignore[assignment]
            mx.eval(packed)
            parts.append(packed)
        self.hold(*parts)

    def hold(self, keys: Parts, values: Parts) -> None:
        """Hold these parts instead of whatever there was."""
        self.keys, self.values = keys, values
        self.n_rows = keys[0].shape[2]

    @classmethod
    def of(cls, cache: QuantizedKVCache) -> QuantizedRows:
        """A store of a quantised cache's rows, with its bits and groups."""
        store = cls(Quantization(cache.bits, cache.group_size))
        store.hold(*(tuple(parts) for parts in cache.keys_and_values()))  # type: ignore[misc]
        return store

    def as_cache(self) -> QuantizedKVCache:
        """mlx-lm's cache of the same rows."""
        cache: Any = QuantizedKVCache(self.quantization.group_size, self.quantization.bits)
        cache.keys, cache.values, cache.offset = self.keys, self.values, self.n_rows
        return cache

    def rows(self) -> tuple[mx.array, mx.array]:
        return self.quantization.unpack(self.keys), self.quantization.unpack(self.values)

    def truncate(self, n: int) -> None:
        if n < self.n_rows and self.keys is not None and self.values is not None:
            keys, values = ([x[:, :, :n] for x in parts] for parts in (self.keys, self.values))
            self.hold(tuple(keys), tuple(values))  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in (*(self.keys or ()), *(self.values or ())))

    @property
    def file_bytes(self) -> int:
        return 0

    @property
    def row_bytes(self) -> int:
        if self.n_rows == 0:
            return 0
        return sum(rows[:, :, :1].nbytes for rows in self.rows())  # nothing is computed


class FileRows:
    """Rows in a file that is read through a memory map.

    The file has no name, so that its space is free again as soon as the store or the process is gone, however that
    ends. Token after token it holds `(B, n_kv_heads, head_dim)` keys and then values: new rows go to its end.
    """

    def __init__(self) -> None:
        self.n_rows = 0
        self._file: Any = None
        self._dtype: mx.Dtype = mx.float32
        self._shapes: list[tuple[int, int, int]] = []  # of a token's keys and values

    def append(self, keys: mx.array, values: mx.array) -> None:
        B, H, n, _ = keys.shape
        self._shapes = [(B, H, rows.shape[3]) for rows in (keys, values)]
        self._dtype = keys.dtype
        bits = self._bits
        flat = [rows.transpose(2, 0, 1, 3).reshape(n, -1) for rows in (keys, values)]
        tokens = mx.contiguous(mx.concatenate(flat, axis=1)).view(bits)
        data = np.asarray(tokens).data.cast("B")
        try:
            self._write(data, self.file_bytes)
        except OSError as error:
            raise SnapKVError(
                f"a conversation's rows can't be kept in a file in {tempfile.tempdir or 'a temporary folder'}: "
                f"{error.strerror or error}; set TMPDIR to a folder with room, or use another memory"
            ) from error
        self.n_rows += n

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

    def rows(self) -> tuple[mx.array, mx.array]:
        n_keys, n_values = (int(np.prod(shape)) for shape in self._shapes)
        bits = np.uint16 if self._bits == mx.uint16 else np.uint32
        tokens = np.memmap(self._file, bits, "r", shape=(self.n_rows, n_keys + n_values))
        keys, values = (
            np.ascontiguousarray(part.reshape(self.n_rows, *shape).transpose(1, 2, 0, 3))
            for part, shape in zip((tokens[:, :n_keys], tokens[:, n_keys:]), self._shapes)
        )
        return mx.array(keys).view(self._dtype), mx.array(values).view(self._dtype)

    def truncate(self, n: int) -> None:
        if n < self.n_rows:
            self.n_rows = n
            os.ftruncate(self._file.fileno(), self.file_bytes)

    @property
    def _bits(self) -> mx.Dtype:
        """What stands for the rows' dtype in NumPy, which has no bfloat16."""
        return mx.uint16 if self._dtype.size == 2 else mx.uint32

    @property
    def nbytes(self) -> int:
        return 0

    @property
    def file_bytes(self) -> int:
        return self.n_rows * self.row_bytes

    @property
    def row_bytes(self) -> int:
        return sum(B * H * D for B, H, D in self._shapes) * self._dtype.size
