"""Reads requests and writes answers in OpenAI's batch format, one JSON object per line.

If a run is interrupted, the next run continues the same answer file.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO

from ..completions.body import Body, parse_body
from ..errors import Option, SnapKVError
from ..json_lines import JsonLines

# Error codes.
DUPLICATE = "duplicate_custom_id"
NO_OBJECT = "invalid_json_line"
START = b'{"id": "batch_req_'  # the first bytes of every line in an answer file


@dataclass(frozen=True)
class Line:
    """A line in a request file.

    Attributes:
        number: line number, counted from 1.
        custom_id: the request's `custom_id`, or None if it is missing or invalid.
        body: the request, or None if the line is invalid.
        problem: what is wrong with the line, worded to follow "line 7". None if the line is valid.
        code: error code for the problem.
    """

    number: int
    custom_id: str | None
    body: Body | None = None
    problem: str | None = None
    code: str = "invalid_request"

    @property
    def key(self) -> str | int:
        """Return the key by which a later run recognises the line.

        The key is the `custom_id` or, if that is missing, invalid or repeated, the line number.
        """
        if self.custom_id is None or self.code == DUPLICATE:
            return self.number
        return self.custom_id


class RequestsFile:
    """A request file that is parsed lazily.

    Args:
        stream: the file, positioned at the first request. A stream that can't seek, such as a pipe, is copied to a
            temporary file.

    Attributes:
        n_lines: number of non-blank lines.

    Raises: SnapKVError: no line is a JSON object.
    """

    def __init__(self, stream: BinaryIO):
        """Count the lines, and check that at least one is a JSON object."""
        self._stream: IO[bytes] = stream
        if not stream.seekable():
            self._stream = tempfile.TemporaryFile()  # noqa: SIM115  # closed with this object
            shutil.copyfileobj(stream, self._stream)
            self._stream.seek(0)
        self._start = self._stream.tell()
        self.n_lines = sum(1 for _ in self._raw_lines())
        if self.n_lines == 0:
            raise SnapKVError("the file must hold one JSON object per line, and it has none")
        if all(line.code == NO_OBJECT for line in self):
            first_line = next(iter(self))
            raise SnapKVError(
                f"the file must hold one JSON object per line, and line {first_line.number} {first_line.problem}"
            )

    def __iter__(self) -> Iterator[Line]:
        """Yield every non-blank line. Lines that repeat a `custom_id` are marked as invalid."""
        first_lines: dict[str, int] = {}  # `custom_id` -> number of its first line
        for number, raw_line in self._raw_lines():
            line = _parse_line(number, raw_line)
            if line.custom_id is not None:
                first_number = first_lines.setdefault(line.custom_id, number)
                if first_number != number:
                    problem = f"custom_id {line.custom_id!r} is line {first_number}'s already"
                    line = Line(number, line.custom_id, problem=problem, code=DUPLICATE)
            yield line

    def _raw_lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the number and the bytes of every non-blank line. Remove any byte order mark."""
        self._stream.seek(self._start)
        for number, raw_line in enumerate(self._stream, start=1):
            text = raw_line.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw_line
            if text.strip():
                yield number, text


def _parse_line(number: int, raw_line: bytes) -> Line:
    """Parse a line. If it is invalid, `problem` says why."""
    try:
        record = json.loads(raw_line.decode())
    except (ValueError, RecursionError) as error:
        problem = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else "is not JSON"
        return Line(number, custom_id=None, problem=problem, code=NO_OBJECT)
    if not isinstance(record, dict):
        return Line(number, custom_id=None, problem="is not an object", code=NO_OBJECT)
    custom_id = record.get("custom_id")
    if custom_id is None:
        return Line(number, custom_id=None, problem="custom_id is missing")
    if not isinstance(custom_id, str) or not custom_id:
        problem = f"custom_id must be text, got {str(custom_id)[:60]!r}"
        return Line(number, custom_id=None, problem=problem)
    try:
        method = record.get("method", "POST")
        if method != "POST":
            raise SnapKVError(f"method must be POST, got {str(method)[:60]!r}")
        body = parse_body(record.get("url"), record.get("body"))
        if body.stream:
            raise SnapKVError("stream must be false, since a batch file holds whole answers")
    except SnapKVError as error:
        return Line(number, custom_id, problem=str(error))
    return Line(number, custom_id, body)


class AnswersFile:
    """An answer file, with one answer per line. Every line is flushed to disk before the next one is written.

    Use it in a `with` block, which locks the file for this process and cuts off an incomplete last line. Until the
    block is entered, the file is only read.

    Args:
        path: the file. It need not exist yet.
        model: model name to record in each answer.
        about: the run's settings by name, to record in the `mlx_snapkv` field of each answer.

    Attributes:
        n_answered, n_errors: numbers of answers and errors in the file.

    Raises:
        SnapKVError: the file can't be written, is locked by another process, has answers from a run with a different
            model or settings, is damaged, or is not an answer file.
        OSError: `answer` or `error` could not write a line, for example because the disk is full. All earlier lines are
            complete.
    """

    def __init__(self, path: Path, model: str, about: dict[str, Any]):
        """Read the answers that are already in the file."""
        self.path = path
        self.model = model
        self.about = about
        self._lines = JsonLines(path, START)
        self._read()

    def _read(self) -> None:
        """Register all answers and errors in the file."""
        self._keys: set[str | int] = set()
        self.n_answered = self.n_errors = 0
        for number, line in self._lines.read():
            self._add_line(number, line)

    def _add_line(self, number: int, raw_line: bytes) -> None:
        """Register an answer or error from the file.

        Raises: SnapKVError: the line is damaged, was not written by this package, or was written by a run with a
            different model or settings.
        """
        try:
            key, earlier_run = _key_and_run(raw_line)
            self._keys.add(key)
        except (ValueError, TypeError, KeyError):
            if number == 1:
                problem = " exists, and mlx-snapkv did not write it: give another --output"
            else:
                problem = f": line {number} is damaged: delete that line"
            raise SnapKVError(f"{self.path}{problem}") from None
        if earlier_run is None:
            self.n_errors += 1
        else:
            self._require_same_run(earlier_run)
            self.n_answered += 1

    def _require_same_run(self, earlier_run: dict[str, Any]) -> None:
        """Check that an answer's run had the same model and settings as this run. Raises: SnapKVError."""
        run = {"model": self.model, **self.about}
        for name, value in run.items():
            earlier_value = earlier_run.get(name)
            if earlier_value != value:
                earlier_text = "none" if earlier_value is None else repr(earlier_value)
                value_text = "none" if value is None else repr(value)
                raise SnapKVError(
                    f"{self.path} belongs to another run, with {{}} {earlier_text} instead of {value_text}: "
                    "give another --output, or delete the file",
                    Option(name),
                )

    def __enter__(self) -> AnswersFile:
        """Lock the file, and read it again in case another process has written to it."""
        self._lines.open(self._read)
        return self

    def __exit__(self, *exception: object) -> None:
        """Close and unlock the file."""
        self._lines.close()

    def has(self, line: Line) -> bool:
        """Return whether the file already has an answer or error for a request."""
        return line.key in self._keys

    def answer(self, line: Line, body: dict[str, Any]) -> None:
        """Write a request's answer. `body` is the completion. Raises: OSError."""
        response = {"status_code": 200, "request_id": uuid.uuid4().hex, "body": body}
        self._append(line, response=response, error=None)
        self.n_answered += 1

    def error(self, line: Line, code: str, sentence: str) -> None:
        """Write an error in place of a request's answer. Raises: OSError."""
        error_fields = {
            "code": code,
            "message": f"line {line.number}: {sentence}",
            "line": line.number,
        }
        self._append(line, response=None, error=error_fields)
        self.n_errors += 1

    def _append(self, line: Line, **outcome: Any) -> None:
        """Append a request's answer or error to the file, atomically. Raises: OSError."""
        record = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id, **outcome}
        self._lines.append(record)
        self._keys.add(line.key)


def _key_and_run(raw_line: bytes) -> tuple[str | int, dict[str, Any] | None]:
    """Parse a line of an answer file. Return the request's key, and the run's model and settings.

    The key is `Line.key`. For an error line, which records no model or settings, the second result is None.

    Raises: ValueError, TypeError, KeyError: the line is damaged, or was not written by this package.
    """
    if not raw_line.startswith(START):
        raise ValueError
    record = json.loads(raw_line)
    custom_id = record["custom_id"]
    error = record["error"]
    if error is not None:
        return Line(error["line"], custom_id, code=error["code"]).key, None
    if custom_id is None:  # only an error line is allowed to have no id
        raise ValueError
    body = record["response"]["body"]
    return custom_id, {"model": body["model"], **body["mlx_snapkv"]}
