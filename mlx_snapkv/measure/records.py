"""Store evaluation records in a file, so that a later run measures only the missing ones."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

import mlx.core as mx

from ..errors import SnapKVError
from ..json_lines import JsonLines
from .tables import Record

Measure = Callable[[list[Record]], Iterable[Record]]

# Fields that identify a record. All except the method are optional.
RECORD_KEYS = ("method", "setting", "task", "length", "document", "piece", "question")


class Results:
    """Evaluation records, in memory and optionally in a file of JSON lines.

    The file's first line has the fields that all records share (`setting`). New records are appended, and a later run
    continues the file. Nothing is written until the object is used in a `with` block.

    Args:
        setting: fields that all records share.
        path: the file, which need not exist yet. None keeps the records only in memory.

    Raises: SnapKVError: the file can't be written, is in use by another run, has a different setting or a damaged line,
        or was not written by this class.
    """

    def __init__(self, setting: Record, path: Path | None = None):
        """Read the file's records."""
        self._setting = setting
        self._records: dict[tuple, Record] = {}
        self._lines = None if path is None else JsonLines(path, b'{"')
        self._read()

    def __enter__(self) -> "Results":
        """Lock the file, read it again, and write the setting if the file is empty."""
        if self._lines is not None:
            self._lines.open(self._read)
            if self._lines.is_empty:
                self._lines.append(self._setting)
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the file and release the lock."""
        if self._lines is not None:
            self._lines.close()

    def get(self, keys: Record) -> Record | None:
        """Return the record whose `RECORD_KEYS` match those of `keys`, or None if it is missing."""
        return self._records.get(_record_key(keys))

    def add(self, record: Record) -> None:
        """Add a record, converting scalar arrays to numbers."""
        json_record = {
            name: value.item() if isinstance(value, mx.array) else value
            for name, value in record.items()
        }
        self._records[_record_key(json_record)] = json_record
        if self._lines is not None:
            self._lines.append(json_record)

    def complete(
        self,
        documents: Iterable[tuple[list[Record], Measure]],
        on_document: Callable[[], None] = lambda: None,
    ) -> list[Record]:
        """Measure missing records, document by document, and return the records of all documents.

        Args:
            documents: for each document, the keys of its records and a function to measure them. The function takes the
                keys of the missing records and yields the complete records. Their values may be scalar arrays.
            on_document: called after each document.
        """
        all_keys: list[Record] = []
        for keys, measure_records in documents:
            all_keys += keys
            missing_keys = [key for key in keys if self.get(key) is None]
            if missing_keys:
                for record in measure_records(missing_keys):
                    self.add(record)
            on_document()
        return [self._records[_record_key(key)] for key in all_keys]

    def _read(self) -> None:
        """Read the file's records.

        Raises: SnapKVError: the file can't be written, has a different setting, or has a damaged line.
        """
        if self._lines is None:
            return
        for number, line in self._lines.read():
            is_setting = number == 1
            if is_setting:
                self._require_setting(line, self._lines.path)
                continue
            try:
                record = json.loads(line)
                self._records[_record_key(record)] = record
            except (ValueError, TypeError, KeyError):
                problem = f"line {number} is damaged: delete that line"
                raise SnapKVError(f"{self._lines.path}: {problem}") from None

    def _require_setting(self, line: bytes, path: Path) -> None:
        """Check that the file's first line is this object's setting. Raises: SnapKVError."""
        try:
            file_setting = dict(json.loads(line))
        except (ValueError, TypeError):
            file_setting = {}
        for name in [*self._setting, *file_setting]:
            file_value = file_setting.get(name)
            value = self._setting.get(name)
            if file_value != value:
                raise SnapKVError(
                    f"{path} belongs to another run, with {name} {file_value!r} instead of {value!r}: "
                    "give another --output, or delete the file"
                )


def _record_key(record: Record) -> tuple:
    """Return the record's values for `RECORD_KEYS`. Raises: KeyError: the record has no method."""
    return record["method"], *(record.get(name) for name in RECORD_KEYS[1:])
