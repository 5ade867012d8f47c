"""OpenAI's batch-output file, which a later run goes on from."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import uuid
from pathlib import Path
from typing import Any

from ..errors import SnapKVError
from ..paths import reason, require_place
from .requests_file import DUPLICATE, Line

START = b'{"id": "batch_req_'  # of every line


class AnswersFile:
    """The answers of a run, a line each. A line is on the disk before the next is begun.

    Nothing is written before it is entered as a context: it then belongs to this process, and a last line that was
    not finished is dropped.

    Args:
        run: what all answers have in common: the fields of their `mlx_snapkv`, and `model`.

    Attributes:
        n_answered, n_errors: lines of each kind.

    Raises:
        SnapKVError: the file can't be written, is of another run, or not such a file; or another process writes it.
        OSError: from `add`: the disk is full, say. All lines but the last are whole.
    """

    def __init__(self, path: Path, run: dict[str, Any]):
        self.path, self._run = path, run
        self._file = -1
        self._read()

    def _read(self) -> None:
        self._keys: set[str | int] = set()
        self.n_answered = self.n_errors = self._size = 0
        if not require_place(self.path):
            return
        number, raw = 0, b""
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if raw.endswith(b"\n"):
                    self._take(number, raw)
                    self._size += len(raw)
        rest = b"" if raw.endswith(b"\n") else raw.rstrip(b"\0")  # which a power cut leaves
        if not (rest.startswith(START) or START.startswith(rest)):
            self._take(number, rest)

    def _take(self, number: int, raw: bytes) -> None:
        """Take note of a line that is there."""
        try:
            if not raw.startswith(START):
                raise ValueError
            found = json.loads(raw)
            custom_id, error, response = found["custom_id"], found["error"], found["response"]
            named = custom_id is not None and (error is None or error["code"] != DUPLICATE)
            self._keys.add(custom_id if named else error["line"])
            if error is None:
                body = response["body"]
                self._require_same({"model": body["model"], **body["mlx_snapkv"]})
        except SnapKVError:
            raise
        except (ValueError, TypeError, KeyError):
            told = (
                f"{self.path} is there already, and mlx-snapkv did not write it: give another --output"
                if number == 1
                else f"{self.path}: line {number} is damaged: delete that line"
            )
            raise SnapKVError(told) from None
        self.n_answered += error is None
        self.n_errors += error is not None

    def _require_same(self, found: dict[str, Any]) -> None:
        for name, wanted in self._run.items():
            if found.get(name) != wanted:
                was, now = ("none" if x is None else repr(x) for x in (found.get(name), wanted))
                raise SnapKVError(
                    f"{self.path} is of another run, with {name} {was} and not {now}: "
                    "give another --output, or delete it"
                )

    def __enter__(self) -> AnswersFile:
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read()
            os.ftruncate(self._file, self._size)
            _sync_folder(self.path)
        except BlockingIOError:
            self.__exit__()
            raise SnapKVError(f"{self.path} is being written by another run: wait for it") from None
        except OSError as error:
            self.__exit__()
            raise SnapKVError(f"{self.path} can't be written: {reason(error)}") from error
        except SnapKVError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file >= 0:
            os.close(self._file)  # which gives up the lock, too
            self._file = -1

    def has(self, line: Line) -> bool:
        """Whether a line has been answered, or found wrong."""
        return line.key in self._keys

    def answer(self, line: Line, body: dict[str, Any]) -> None:
        """Write a response's body."""
        response = {"status_code": 200, "request_id": uuid.uuid4().hex, "body": body}
        self._add(line, response, None)
        self.n_answered += 1

    def error(self, line: Line, code: str, sentence: str) -> None:
        """Write why there is none."""
        told = {"code": code, "message": f"line {line.number}: {sentence}", "line": line.number}
        self._add(line, None, told)
        self.n_errors += 1

    def _add(self, line: Line, response: Any, error: Any) -> None:
        record = {
            "id": f"batch_req_{uuid.uuid4().hex}",
            "custom_id": line.custom_id,
            "response": response,
            "error": error,
        }
        data = json.dumps(record).encode() + b"\n"
        try:
            _write(self._file, data)
            _sync(self._file)
        except OSError as failed:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._size)
            told = f"{self.path} can't be written: {reason(failed)}"
            raise OSError(failed.errno, told) from failed
        self._size += len(data)
        self._keys.add(line.key)


def _write(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]


def _sync(file: int) -> None:
    """Have it all on the disk; a Mac's `fsync` is content with the disk's own memory."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        with contextlib.suppress(OSError):  # not every file system can
            fcntl.fcntl(file, fcntl.F_FULLFSYNC)
            return
    os.fsync(file)


def _sync_folder(path: Path) -> None:
    """Have the file's name on the disk as well."""
    folder = os.open(Path(os.path.realpath(path)).parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
