"""Consecutive entries of a layer, in a file of keys and one of values."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import mlx.core as mx
import numpy as np

from ..entries.quantization import Quantization, Stored, n_rows, pack, unpack
from ..entries.quantization import rows as rows_of
from ..errors import EntryFileError, SnapKVError
from .entry_file import EntryFile, TemporaryFile
from .row_bytes import RowBytes


class FixedPart:
    """The first `n_entries` of two files, which nobody changes.

    Args:
        files: of keys and of values.
    """

    waits = True

    def __init__(self, files: Sequence[EntryFile], n_entries: int):
        self.files, self.n_entries = files, n_entries

    def first(self, n: int) -> FixedPart:
        """The first `n` of them, or all."""
        return FixedPart(self.files, min(n, self.n_entries))

    def read_keys(self, start: int, stop: int) -> mx.array:
        return self.files[0].read(start, stop)

    def gather(self, places: mx.array) -> tuple[mx.array, mx.array]:
        chosen = np.array(places)
        keys, values = (file.gather(chosen) for file in self.files)
        return keys, values

    def entries(self) -> tuple[mx.array, mx.array]:
        """All keys and values, `(B, n_kv_heads, n_entries, head_dim)`."""
        keys, values = (file.read(0, self.n_entries) for file in self.files)
        return keys, values

    def data(self, start: int, stop: int) -> list[np.ndarray]:
        """Keys and values of `[start, stop)` as they lie there, uint8 `(stop - start, B, n_kv_heads, row)`."""
        return [file.data(start, stop) for file in self.files]


class GrowingPart(FixedPart):
    """Two files without names, whose space is free again as soon as the last user or the process is gone.

    New entries go to the end, behind the back of whoever computes the next.

    Args:
        quantization: how entries are quantised, each by itself; None is not at all.
    """

    files: Sequence[TemporaryFile]

    def __init__(self, quantization: Quantization | None):
        super().__init__([], 0)  # until it is known what keys and values are
        self._quantization = quantization
        self._writing: Future | None = None
        self._n_written = 0

    def append(self, keys: mx.array, values: mx.array) -> None:
        self.append_stored(*(pack(rows, self._quantization) for rows in (keys, values)))

    def append_stored(self, keys: Stored, values: Stored) -> None:
        """Add rows that are quantised already, if they are to be."""
        self.wait()
        how = self._quantization
        if not self.files:
            ones = [unpack(rows_of(stored, 0, 1), how) for stored in (keys, values)]
            self.files = [TemporaryFile(RowBytes.of(one, how)) for one in ones]
        data = [file.layout.laid_out(stored) for file, stored in zip(self.files, (keys, values))]
        mx.eval(data)
        self.n_entries += n_rows(keys)
        self._writing = _writer().submit(self._write, list(map(np.asarray, data)))

    def _write(self, data: list[np.ndarray]) -> None:
        for file, rows in zip(self.files, data):
            file.write(rows, self._n_written)

    def wait(self) -> None:
        """Until what was appended is written.

        Raises:
            EntryFileError: it could not be; the files hold what was before.
        """
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        try:
            writing.result()
            self._n_written = self.n_entries
        except BaseException as error:
            if not writing.done():  # an interrupt of ours, not a failure of its
                self._writing = writing
                raise
            self.n_entries = self._n_written
            self._cut()
            if not isinstance(error, OSError):
                raise
            raise EntryFileError(
                f"entries can't be kept in a file in {tempfile.gettempdir()}: {error.strerror or error}; "
                "set TMPDIR or --store-dir to a folder with room, or use another memory"
            ) from error

    def truncate(self, n: int) -> None:
        """Hold the first `n` entries only."""
        if n >= self.n_entries:
            return
        with contextlib.suppress(SnapKVError):  # what there was no room for is not to stay anyway
            self.wait()
        self.n_entries = self._n_written = min(n, self.n_entries)
        self._cut()

    def _cut(self) -> None:
        for file in self.files:
            file.cut(self.n_entries)


@cache
def _writer() -> ThreadPoolExecutor:
    """The thread that writes for all stores of the process."""
    return ThreadPoolExecutor(1, thread_name_prefix="mlx-snapkv-entries")
