"""Records of a run, in a file of JSON lines that a later run goes on from."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..errors import SnapKVError
from ..paths import naming, put_result

Record = dict[str, Any]

KEYS = ("method", "setting", "task", "length", "document", "question")


class Results:
    """Records by what was asked of whom.

    Args:
        keys: the names of a record's values that tell it from all others.

    With a path, each is appended to that file as it comes; the file's first line is the setting. A last line that
    was not finished is dropped.

    Raises:
        SnapKVError: the file is not of this setting, or not such a file.
    """

    def __init__(
        self,
        setting: dict[str, Any],
        path: Path | None = None,
        keys: tuple[str, ...] = KEYS,
    ):
        self._path = path
        self._keys = keys
        self._records = {self._key(record): record for record in self._loaded(setting)}

    def get(self, wanted: Record) -> Record | None:
        """The record with the same keys as `wanted`."""
        return self._records.get(self._key(wanted))

    def add(self, record: Record) -> None:
        self._records[self._key(record)] = record
        if self._path is not None:
            with naming(self._path), self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def _key(self, record: Record) -> tuple:
        return tuple(record[name] for name in self._keys)

    def _loaded(self, setting: dict[str, Any]) -> list[Record]:
        """The records that the file has."""
        path, records = self._path, []
        if path is None:
            return []
        data = path.read_bytes() if path.exists() else b""
        header = (json.dumps(setting) + "\n").encode()
        if header.startswith(data):  # nothing yet, or not even all of the first line
            put_result(path, header)
            return []
        whole = data[: data.rfind(b"\n") + 1]
        first, *lines = whole.splitlines() or [b""]
        _require_same(setting, first, path)
        for number, line in enumerate(lines, start=2):
            try:
                record = json.loads(line)
                hash(self._key(record))
                records.append(record)
            except (ValueError, TypeError, KeyError):
                raise SnapKVError(f"{path}: line {number} is damaged: delete that line") from None
        if len(whole) < len(data):
            os.truncate(path, len(whole))
        return records


def _require_same(setting: dict[str, Any], first: bytes, path: Path) -> None:
    """Raises: SnapKVError: a file's first line is not this setting."""
    try:
        found = json.loads(first)
    except ValueError:
        found = None
    if not isinstance(found, dict) or "task" not in found:
        raise SnapKVError(f"{path} is not the file of an evaluation: choose another --output")
    for name in dict.fromkeys([*setting, *found]):
        if found.get(name) != setting.get(name):
            raise SnapKVError(
                f"{path} is of another run, with {name} {found.get(name)!r} and not {setting.get(name)!r}: "
                "choose another --output, or delete it"
            )
