"""Files without a name, which go with whoever reads them."""

from __future__ import annotations

import math
import os
import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from ...entries.quantization import Stored, arrays
from ...errors import EntryFileError
from ..open_files import allow_more_files, is_open_files_limit, limit_reached


def temporary_file(folder: str | None = None) -> Any:
    """Open a new file in a folder, by default TMPDIR. Raises: OSError."""
    allow_more_files()
    return tempfile.TemporaryFile(prefix="mlx-snapkv-", buffering=0, dir=folder)


def write_at(file: Any, data: memoryview, start: int) -> None:
    """Write bytes from `start` on. Raises: OSError."""
    while data:
        n = os.pwrite(file.fileno(), data, start)
        data, start = data[n:], start + n


def no_room(error: OSError, folder: str | None = None) -> EntryFileError:
    """Return what to tell a user for whom a file in the folder can't be made or written."""
    why = f"{error.strerror or error}; set TMPDIR or --store-dir to a folder with room"
    why = limit_reached() if is_open_files_limit(error) else why
    return EntryFileError(
        f"entries can't be kept in a file in {folder or tempfile.gettempdir()}: {why}, or use another store"
    )


class AsideFile:
    """A file that rows are put in, to be read as they were; in a folder, by default TMPDIR."""

    _file: Any = None  # until there are some
    _size = 0

    def __init__(self, folder: str | None = None):
        self._folder = folder

    def put(self, stored: Stored) -> Callable[[], Stored]:
        """Put rows at its end; the result reads them. Raises: EntryFileError: there is no room."""
        read = [self._put(x) for x in arrays(stored)]
        if isinstance(stored, mx.array):
            return read[0]
        return lambda: tuple(part() for part in read)

    def _put(self, array: mx.array) -> Callable[[], mx.array]:
        data, start = np.asarray(mx.contiguous(array).flatten().view(mx.uint8)).data, self._size
        try:
            if self._file is None:
                self._file = temporary_file(self._folder)
                weakref.finalize(self, self._file.close)
            write_at(self._file, data, start)
        except OSError as error:
            raise no_room(error, self._folder) from error
        self._size += len(data)
        return partial(self._read, start, array.shape, array.dtype)

    def _read(self, start: int, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """Raises: EntryFileError: the file can't be read, or is shorter."""
        size, data = math.prod(shape) * dtype.size, b""
        try:
            while len(data) < size:
                piece = os.pread(self._file.fileno(), size - len(data), start + len(data))
                if not piece:
                    raise OSError("it is shorter than it was")
                data += piece
        except OSError as error:
            raise EntryFileError(f"a temporary file can't be read: {error}") from error
        return mx.array(np.frombuffer(data, np.uint8)).view(dtype).reshape(shape)
