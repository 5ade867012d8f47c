"""Records of an evaluation, in a file that a later run completes."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import mlx.core as mx

from ..errors import SnapKVError
from ..json_lines import JsonLines
from .tables import Record

Measure = Callable[[list[Record]], Iterable[Record]]

RECORD_KEYS = ("method", "setting", "task", "length", "document", "piece", "question")


class Results:
    """Records, identified by their method, and by those of the other `RECORD_KEYS` that they have.

    With a path, each is appended to that file of JSON lines as it comes; the first line is the setting. A later run
    goes on from the file. Nothing is written before the results are entered as a context.

    Raises: SnapKVError: the file is not of this setting, or not such a file.
    """

    def __init__(self, setting: Record, path: Path | None = None):
        self._setting, self._records = setting, dict[tuple, Record]()
        self._lines = None if path is None else JsonLines(path, b'{"')
        self._read()

    def __enter__(self) -> "Results":
        if self._lines is not None:
            self._lines.open(self._read)
            if self._lines.is_empty:
                self._lines.append(self._setting)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._lines is not None:
            self._lines.close()

    def get(self, wanted: Record) -> Record | None:
        return self._records.get(_key(wanted))

    def add(self, record: Record) -> None:
        """Add a record; its arrays become numbers."""
        made = {k: x.item() if isinstance(x, mx.array) else x for k, x in record.items()}
        self._records[_key(made)] = made
        if self._lines is not None:
            self._lines.append(made)

    def complete(
        self,
        documents: Iterable[tuple[list[Record], Measure]],
        on_document: Callable[[bool], None] = lambda measured: None,
    ) -> list[Record]:
        """Measure the records that are missing, document by document, and return all records of all documents.

        Args:
            documents: the keys of each document's records, and a function that measures the missing ones. Its records
                may hold arrays.
            on_document: called after each document, with whether anything of it was measured.
        """
        wanted: list[Record] = []
        for places, measure in documents:
            wanted += places
            missing = [place for place in places if self.get(place) is None]
            for record in measure(missing) if missing else ():
                self.add(record)
            on_document(bool(missing))
        return [self._records[_key(place)] for place in wanted]

    def _read(self) -> None:
        for number, line in () if self._lines is None else self._lines.read():
            if number == 1:
                self._require_setting(line)
                continue
            try:
                record = json.loads(line)
                self._records[_key(record)] = record
            except (ValueError, TypeError, KeyError):
                why = f"line {number} is damaged: delete that line"
                raise SnapKVError(f"{self._lines.path}: {why}") from None  # type: ignore[union-attr]

    def _require_setting(self, line: bytes) -> None:
        try:
            found = dict(json.loads(line))
        except (ValueError, TypeError):
            found = {}
        for name in [*self._setting, *found]:
            was, now = found.get(name), self._setting.get(name)
            if was != now:
                raise SnapKVError(
                    f"{self._lines.path} belongs to another run, with {name} {was!r} instead of {now!r}: "  # type: ignore[union-attr]
                    "give another --output, or delete the file"
                )


def _key(record: Record) -> tuple:
    return record["method"], *map(record.get, RECORD_KEYS[1:])
