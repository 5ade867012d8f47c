"""Keep the records of an evaluation in a file, so that a later run measures only the missing ones."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import mlx.core as mx

from ..errors import SnapKVError
from ..json_lines import JsonLines
from .tables import Record

Measure = Callable[[list[Record]], Iterable[Record]]

# These fields identify a record; all but the method are optional.
RECORD_KEYS = ("method", "setting", "task", "length", "document", "piece", "question")


class Results:
    """The records of an evaluation, in memory and, with a path, in a file of JSON lines.

    The file's first line is the setting, and each new record is appended. A later run reads the file and continues it.
    Nothing is written before the results are entered as a context.

    Args:
        setting: what all records have in common.

    Raises: SnapKVError: the file has another setting, or was not written by this class.
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

    def get(self, keys: Record) -> Record | None:
        """Return the record with the same `RECORD_KEYS` as `keys`; None if it is missing."""
        return self._records.get(_key(keys))

    def add(self, record: Record) -> None:
        """Add a record, with numbers instead of its scalar arrays."""
        numbers = {k: x.item() if isinstance(x, mx.array) else x for k, x in record.items()}
        self._records[_key(numbers)] = numbers
        if self._lines is not None:
            self._lines.append(numbers)

    def complete(
        self,
        documents: Iterable[tuple[list[Record], Measure]],
        on_document: Callable[[bool], None] = lambda measured: None,
    ) -> list[Record]:
        """Measure the missing records, document by document, and return the records of all documents.

        Args:
            documents: for each document the keys of its records, and a function that takes the keys of the missing
                records and yields these records, which may hold scalar arrays.
            on_document: called after each document, with whether any of its records was measured.
        """
        wanted: list[Record] = []
        for keys, measure in documents:
            wanted += keys
            missing = [key for key in keys if self.get(key) is None]
            for record in measure(missing) if missing else ():
                self.add(record)
            on_document(bool(missing))
        return [self._records[_key(key)] for key in wanted]

    def _read(self) -> None:
        """Read the file's records. Raises: SnapKVError: it has another setting, or a line is damaged."""
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
        """Check the file's first line. Raises: SnapKVError: it is not this setting."""
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
