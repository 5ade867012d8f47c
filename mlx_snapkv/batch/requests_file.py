"""OpenAI's batch file: a request a line."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any, BinaryIO

from ..completions.body import Body, parse
from ..errors import SnapKVError


@dataclass(frozen=True)
class Line:
    """A line of the file, from 1, and what is wrong with it, or its body."""

    number: int
    custom_id: str | None
    body: Body | None = None
    problem: str | None = None
    code: str = "invalid_request"

    @property
    def key(self) -> str | int:
        """What tells it from all others, in a later run too: its own name, or where it stands."""
        named = self.custom_id is not None and self.code != DUPLICATE
        return self.custom_id if named else self.number  # type: ignore[return-value]


DUPLICATE = "duplicate_custom_id"
NO_OBJECT = "invalid_json_line"


class RequestsFile:
    """The requests of a file, read as they are wanted.

    Args:
        stream: the file, at its start.

    Attributes:
        n_lines: those that aren't blank.

    Raises:
        SnapKVError: there are lines, and not one of them is a JSON object.
    """

    def __init__(self, stream: BinaryIO):
        self._stream: IO[bytes] = stream
        if not stream.seekable():
            self._stream = tempfile.TemporaryFile()  # noqa: SIM115  # as long as this
            while piece := stream.read(1 << 20):
                self._stream.write(piece)
            self._stream.seek(0)
        self._start = self._stream.tell()
        self.n_lines = sum(1 for _ in self._raw())
        self._require_objects()

    def _require_objects(self) -> None:
        first = None
        for number, raw in self._raw():
            line = _line(number, raw)
            if line.code != NO_OBJECT:
                return
            first = first or line
        if first is not None:
            told = f"line {first.number} {first.problem}"
            raise SnapKVError(f"the requests must be a JSON object a line; none is, and {told}")

    def __iter__(self) -> Iterator[Line]:
        """Every line that isn't blank; of two with the same `custom_id` the second is a mistake."""
        seen: dict[str, int] = {}
        for number, raw in self._raw():
            line = _line(number, raw)
            if line.custom_id is not None:
                first = seen.setdefault(line.custom_id, number)
                if first != number:
                    what = f"custom_id {line.custom_id!r} is line {first}'s already"
                    line = Line(number, line.custom_id, problem=what, code=DUPLICATE)
            yield line

    def _raw(self) -> Iterator[tuple[int, bytes]]:
        self._stream.seek(self._start)
        for number, raw in enumerate(self._stream, start=1):
            text = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            if text.strip():
                yield number, text


def _line(number: int, raw: bytes) -> Line:
    try:
        found = json.loads(raw.decode())
    except (ValueError, RecursionError) as error:
        problem = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else "is not JSON"
        return Line(number, None, problem=problem, code=NO_OBJECT)
    if not isinstance(found, dict):
        return Line(number, None, problem="is not an object", code=NO_OBJECT)
    custom_id = found.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        shown = (
            "is missing" if custom_id is None else f"must be some text, got {str(custom_id)[:60]!r}"
        )
        return Line(number, None, problem=f"custom_id {shown}")
    try:
        return Line(number, custom_id, _body(found))
    except SnapKVError as error:
        return Line(number, custom_id, problem=str(error))


def _body(found: dict[str, Any]) -> Body:
    method = found.get("method", "POST")
    if method != "POST":
        raise SnapKVError(f"method must be POST, got {str(method)[:60]!r}")
    body = parse(found.get("url"), found.get("body"))
    if body.stream:
        raise SnapKVError("stream must be false: answers come whole")
    return body
