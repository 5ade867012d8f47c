"""The loop of all evaluations: measure, document by document, what a file of records does not hold yet."""

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import mlx.core as mx

from ..errors import SnapKVError
from ..paths import naming, put_result
from .tables import Record

Measure = Callable[[list[Record]], Iterable[Record]]

KEYS = ("method", "setting", "task", "length", "document", "piece", "question")


class Results:
    """Records, identified by their method, and by those of the other `KEYS` that they have.

    With a path, each is appended to that file of JSON lines as it comes; the first line is the setting. A later run
    goes on from the file, without a last line that was not finished.

    Raises: SnapKVError: the file is not of this setting, or not such a file.
    """

    def __init__(self, setting: Record, path: Path | None = None):
        self._path, self._records = path, dict[tuple, Record]()
        if path is not None:
            self._load(setting, path)

    def get(self, wanted: Record) -> Record | None:
        return self._records.get(_key(wanted))

    def add(self, record: Record) -> None:
        """Arrays become numbers."""
        made = {k: x.item() if isinstance(x, mx.array) else x for k, x in record.items()}
        self._records[_key(made)] = made
        if self._path is not None:
            with naming(self._path), self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(made) + "\n")

    def _load(self, setting: Record, path: Path) -> None:
        data = path.read_bytes() if path.exists() else b""
        header = (json.dumps(setting) + "\n").encode()
        if header.startswith(data):  # nothing yet, or not even all of the first line
            put_result(path, header)
            return
        whole = data[: data.rfind(b"\n") + 1]
        first, *lines = whole.splitlines() or [b""]
        try:
            found = dict(json.loads(first))
        except (ValueError, TypeError):
            found = {}
        for name in [*setting, *found]:
            if found.get(name) != setting.get(name):
                raise SnapKVError(
                    f"{path} belongs to another run, with {name} {found.get(name)!r} instead of {setting.get(name)!r}: "
                    "give another --output, or delete the file"
                )
        for number, line in enumerate(lines, start=2):
            try:
                record = json.loads(line)
                self._records[_key(record)] = record
            except (ValueError, TypeError, KeyError):
                raise SnapKVError(f"{path}: line {number} is damaged: delete that line") from None
        os.truncate(path, len(whole))


def _key(record: Record) -> tuple:
    return record["method"], *map(record.get, KEYS[1:])


def run(
    documents: Iterable[tuple[list[Record], Measure]],
    results: Results,
    on_document: Callable[[bool], None] = lambda measured: None,
) -> list[Record]:
    """All records of all documents; what `results` does not hold is measured.

    Args:
        documents: the keys of each document's records, and a function that measures the missing ones. Its records may
            hold arrays.
        on_document: called after each document, with whether anything of it was measured.
    """
    wanted: list[Record] = []
    for places, measure in documents:
        wanted += places
        missing = [place for place in places if results.get(place) is None]
        for record in measure(missing) if missing else ():
            results.add(record)
        on_document(bool(missing))
    return [results.get(place) for place in wanted]  # type: ignore[misc]  # all were added
