"""Write results to JSON Lines files that a later run can continue."""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .errors import SnapKVError
from .paths import naming, refusing, require_place


class JsonLines:
    """A file of JSON objects, one per line. Every line is flushed to disk before the next one is written.

    Nothing is written before `open`, which locks the file for this process until `close`.

    Args:
        path: the file. It need not exist yet.
        start: bytes that every line written by this package starts with.
    """

    def __init__(self, path: Path, start: bytes):
        """Store the path. The file is not opened yet."""
        self.path, self._start = path, start
        self._file = -1
        self._size = 0  # total size of the complete lines in bytes

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Yield every line with its number, counted from 1. Skip an incomplete last line written by this package.

        The total size of the complete lines is stored, so that `open` can cut off the rest.

        Raises: SnapKVError: the file can't be written; OSError: it can't be read.
        """
        self._size = 0
        if not require_place(self.path):
            return
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.endswith(b"\n"):
                    yield number, line
                    self._size += len(line)
                    continue
                # Only the last line can be incomplete. After a power failure, it may end in zero bytes.
                written = line.rstrip(b"\0")
                is_own = written.startswith(self._start) or self._start.startswith(written)
                if not is_own:
                    yield number, written

    def open(self, read: Callable[[], None]) -> None:
        """Lock the file, call `read`, and cut off an incomplete last line.

        Args:
            read: function that reads the file again, in case another process has written to it.

        Raises: SnapKVError: the file can't be written, or another process has locked it.
        """
        with contextlib.ExitStack() as undo, refusing(f"{self.path} can't be written"):
            undo.callback(self.close)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                why = "is in use by another run: wait until that run ends"
                raise SnapKVError(f"{self.path} {why}") from None
            read()
            os.ftruncate(self._file, self._size)
            undo.pop_all()  # keep the file open

    @property
    def is_empty(self) -> bool:
        """Return whether the file had no complete lines when it was last read or written."""
        return self._size == 0

    def close(self) -> None:
        """Close and unlock the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def append(self, record: dict[str, Any]) -> None:
        """Append a record as one line and flush it to disk. If this fails, remove the partial line.

        Raises: OSError: the line can't be written, for example because the disk is full.
        """
        data = json.dumps(record).encode() + b"\n"
        try:
            with naming(self.path), os.fdopen(os.dup(self._file), "ab") as file:
                file.write(data)
                file.flush()
                _sync(self._file)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)  # remove the partial line
            raise
        self._size += len(data)


def _sync(file: int) -> None:
    """Flush an open file to permanent storage. On macOS, `fsync` only flushes to the drive's cache."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        with contextlib.suppress(OSError):  # some file systems don't support it
            fcntl.fcntl(file, fcntl.F_FULLFSYNC)
            return
    os.fsync(file)
