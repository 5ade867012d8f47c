"""A layer's entries in files."""

import contextlib
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import mlx.core as mx
import numpy as np

from ..entries.entries import Entries
from ..entries.quantization import Quantization
from ..errors import SnapKVError
from .entry_file import EntryFile, TemporaryFile
from .row_bytes import RowBytes


class FileStore:
    """Entries in two files, of keys and of values, that are read through memory maps.

    The files have no names, so that their space is free again as soon as the store or the process is gone, however that
    ends. Token after token they hold `(B, n_kv_heads, ...)`: new entries go to the end, behind the back of whoever
    computes the next.

    Args:
        quantization: how entries are quantised, each by itself; None is not at all.
    """

    waits = True

    def __init__(self, quantization: Quantization | None = None):
        self.n_entries = 0
        self.quantization = quantization
        self._files: list[TemporaryFile] = []  # of keys and values, once it is known what those are
        self._writing: Future | None = None
        self._n_written = 0

    def append(self, keys: mx.array, values: mx.array) -> None:
        self._wait()
        if not self._files:
            self._files = [
                TemporaryFile(RowBytes.of(rows, self.quantization)) for rows in (keys, values)
            ]
        data = [file.layout.packed(rows) for file, rows in zip(self._files, (keys, values))]
        mx.eval(data)
        self.n_entries += keys.shape[2]
        self._writing = _writer().submit(self._write, list(map(np.asarray, data)))

    def _write(self, data: list[np.ndarray]) -> None:
        for file, rows in zip(self._files, data):
            file.write(rows, self._n_written)

    def flush(self) -> None:
        self._wait()

    def _wait(self) -> None:
        """Until what was appended is written.

        Raises:
            SnapKVError: it could not be; the store holds what was before.
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
            raise SnapKVError(
                f"a conversation's entries can't be kept in a file in {tempfile.gettempdir()}: "
                f"{error.strerror or error}; set TMPDIR or --store-dir to a folder with room, or use another memory"
            ) from error

    def entries(self) -> tuple[mx.array, mx.array]:
        keys, values = self._read(lambda file: file.read(0, self.n_entries))
        return keys, values

    def read_keys(self, start: int, stop: int) -> mx.array:
        self._wait()
        return self._files[0].read(start, stop)

    def gather(self, places: mx.array) -> tuple[mx.array, mx.array]:
        chosen = np.array(places)
        keys, values = self._read(lambda file: file.gather(chosen))
        return keys, values

    def _read(self, of: Callable[[EntryFile], mx.array]) -> list[mx.array]:
        self._wait()
        return [of(file) for file in self._files]

    @property
    def layouts(self) -> list[RowBytes]:
        return [file.layout for file in self._files]

    def data(self, start: int, stop: int) -> list[np.ndarray]:
        self._wait()
        return [file.data(start, stop) for file in self._files]

    def as_cache(self) -> None:
        return None

    def take(self, entries: Entries) -> bool:
        self.append(*entries.plain())
        return True

    def truncate(self, n: int) -> None:
        if n < self.n_entries:
            with contextlib.suppress(
                SnapKVError
            ):  # what there was no room for is not to stay anyway
                self._wait()
            self.n_entries = self._n_written = min(n, self.n_entries)
            self._cut()

    def _cut(self) -> None:
        for file in self._files:
            file.cut(self.n_entries)

    @property
    def nbytes(self) -> int:
        return 0

    @property
    def file_nbytes(self) -> int:
        return self.n_entries * sum(file.layout.token for file in self._files)

    @property
    def entry_bytes(self) -> int:
        return sum(file.layout.token_as_read for file in self._files)


@cache
def _writer() -> ThreadPoolExecutor:
    """The thread that writes for all stores of the process."""
    return ThreadPoolExecutor(1, thread_name_prefix="mlx-snapkv-entries")
