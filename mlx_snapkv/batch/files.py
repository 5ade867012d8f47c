"""Read and write OpenAI's batch files, which have one request or one answer per line.

A later run continues an unfinished file of answers.
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

from ..completions.body import Body, parse
from ..errors import Option, SnapKVError
from ..json_lines import JsonLines

# Codes of errors in answers.
DUPLICATE = "duplicate_custom_id"
NO_OBJECT = "invalid_json_line"
START = b'{"id": "batch_req_'  # the first bytes of every answer


@dataclass(frozen=True)
class Line:
    """A line of the file of requests.

    Attributes:
        number: the line's number, counted from 1.
        body: the request; None if the line is invalid.
        problem: what is wrong with the line, in words that follow its number; None if it is valid.
        code: the error code for the problem.
    """

    number: int
    custom_id: str | None
    body: Body | None = None
    problem: str | None = None
    code: str = "invalid_request"

    @property
    def key(self) -> str | int:
        """Return what identifies the line in all runs: its `custom_id`, or its number."""
        if self.custom_id is None or self.code == DUPLICATE:
            return self.number
        return self.custom_id


class RequestsFile:
    """The requests of a file, parsed one by one.

    Args:
        stream: the file, positioned at its first request. A stream that can't seek, such as a pipe, is copied to a
            temporary file.

    Attributes:
        n_lines: number of lines that are not blank.

    Raises: SnapKVError: the file is not empty, and no line is a JSON object.
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
        if self.n_lines and all(line.code == NO_OBJECT for line in self):
            first = next(iter(self))
            raise SnapKVError(
                f"the file must hold one JSON object per line, and line {first.number} {first.problem}"
            )

    def __iter__(self) -> Iterator[Line]:
        """Yield every non-blank line. A line that repeats a `custom_id` gets a problem."""
        first_lines: dict[str, int] = {}  # `custom_id` -> number of its first line
        for number, raw in self._raw_lines():
            line = _parse_line(number, raw)
            if line.custom_id is not None:
                first = first_lines.setdefault(line.custom_id, number)
                if first != number:
                    problem = f"custom_id {line.custom_id!r} is line {first}'s already"
                    line = Line(number, line.custom_id, problem=problem, code=DUPLICATE)
            yield line

    def _raw_lines(self) -> Iterator[tuple[int, bytes]]:
        """Yield the number and bytes of every non-blank line. A byte order mark is removed."""
        self._stream.seek(self._start)
        for number, raw in enumerate(self._stream, start=1):
            text = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if text.strip():
                yield number, text


def _parse_line(number: int, raw: bytes) -> Line:
    """Parse a line. If it is invalid, its `problem` says why."""
    try:
        record = json.loads(raw.decode())
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
        body = parse(record.get("url"), record.get("body"))
        if body.stream:
            raise SnapKVError("stream must be false, since a batch file holds whole answers")
    except SnapKVError as error:
        return Line(number, custom_id, problem=str(error))
    return Line(number, custom_id, body)


class AnswersFile:
    """The file of a run's answers, one per line. Each line is written to disk before the next one begins.

    Use it in a `with` block: on entry, the file is locked by this process, and an incomplete last line is dropped.
    Nothing is written before.

    Args:
        path: the file, which may not exist yet.
        run: fields that all answers of the run share: `model`, and the run's part of `mlx_snapkv`.

    Attributes:
        n_answered, n_errors: numbers of answers and errors in the file.

    Raises:
        SnapKVError: the file can't be written, belongs to another run or process, or is not a file of answers.
        OSError: `answer` or `error` could not write a line, for example because the disk is full. Earlier lines are
            complete.
    """

    def __init__(self, path: Path, run: dict[str, Any]):
        """Read the answers that the file contains."""
        self.path = path
        self._run = run
        self._lines = JsonLines(path, START)
        self._read()

    def _read(self) -> None:
        """Read the lines of the file."""
        self._keys: set[str | int] = set()
        self.n_answered = self.n_errors = 0
        for number, line in self._lines.read():
            self._note(number, line)

    def _note(self, number: int, raw: bytes) -> None:
        """Add a line of the file to the known answers or errors.

        Raises: SnapKVError: the line is damaged, or belongs to another run.
        """
        try:
            key, run, is_error = _parse_outcome(raw)
            self._keys.add(key)
        except (ValueError, TypeError, KeyError):
            if number == 1:
                why = " exists, and mlx-snapkv did not write it: give another --output"
            else:
                why = f": line {number} is damaged: delete that line"
            raise SnapKVError(f"{self.path}{why}") from None
        if run:
            self._require_same(run)
        if is_error:
            self.n_errors += 1
        else:
            self.n_answered += 1

    def _require_same(self, run: dict[str, Any]) -> None:
        """Check that an answer has the fields of this run. Raises: SnapKVError: it belongs to another run."""
        for name, value in self._run.items():
            earlier = run.get(name)
            if earlier != value:
                was = "none" if earlier is None else repr(earlier)
                now = "none" if value is None else repr(value)
                raise SnapKVError(
                    f"{self.path} belongs to another run, with {{}} {was} instead of {now}: "
                    "give another --output, or delete the file",
                    Option(name),
                )

    def __enter__(self) -> AnswersFile:
        """Lock the file, and read it again, because another process may have written to it."""
        self._lines.open(self._read)
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the file and release the lock."""
        self._lines.close()

    def has(self, line: Line) -> bool:
        """Return whether the file has an answer or error for a line of requests."""
        return line.key in self._keys

    def answer(self, line: Line, body: dict[str, Any]) -> None:
        """Write the answer to a line. `body` is the completion. Raises: OSError."""
        response = {"status_code": 200, "request_id": uuid.uuid4().hex, "body": body}
        self._add(line, response=response, error=None)
        self.n_answered += 1

    def error(self, line: Line, code: str, sentence: str) -> None:
        """Write the error of a line. Raises: OSError."""
        why = {"code": code, "message": f"line {line.number}: {sentence}", "line": line.number}
        self._add(line, response=None, error=why)
        self.n_errors += 1

    def _add(self, line: Line, **outcome: Any) -> None:
        """Write a line to disk, completely or not at all. Raises: OSError."""
        record = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id, **outcome}
        self._lines.append(record)
        self._keys.add(line.key)


def _parse_outcome(raw: bytes) -> tuple[str | int, dict[str, Any], bool]:
    """Parse a line of a file of answers.

    Returns: The key of the request's line, the run's fields (errors have none), and whether the line is an error.

    Raises: ValueError, TypeError, KeyError: the line is damaged, or not an answer of this package.
    """
    if not raw.startswith(START):
        raise ValueError
    record = json.loads(raw)
    custom_id = record["custom_id"]
    error = record["error"]
    if error is not None:
        has_own_id = custom_id is not None and error["code"] != DUPLICATE
        key = custom_id if has_own_id else error["line"]
        return key, {}, True
    if custom_id is None:  # only errors may lack it
        raise ValueError
    body = record["response"]["body"]
    run = {"model": body["model"], **body["mlx_snapkv"]} if body else {}
    return custom_id, run, False
