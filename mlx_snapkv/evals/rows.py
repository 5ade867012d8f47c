"""Rows of data sets that users have on their own disk: JSON lines, a JSON list, or parquet."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import SnapKVError
from ..paths import path_of

Row = dict[str, Any]

TEXT, NUMBER, TEXTS = "text", "a whole number", "a list of texts"
SOME_TEXT, COUNT = "a text that is not empty", "a whole number above 0"


def data_folder(name: str) -> Path:
    """Raises: SnapKVError: it is no folder."""
    folder = path_of(name, "--data")
    if not folder.is_dir():
        raise SnapKVError(f"--data {name}: no such folder")
    return folder


def first_file(folder: Path, *names: str) -> Path | None:
    """The first of these files that is there; a name may have places for any text (`*`).

    Raises:
        SnapKVError: there are several of that name.
    """
    found = next((there for name in names if (there := sorted(folder.glob(name)))), [])
    if len(found) > 1:
        parts = ", ".join(path.name for path in found)
        raise SnapKVError(f"{found[0].parent} has several files where one is read: {parts}")
    return found[0] if found else None


def chosen_tasks(given: list[str] | None, found: list[str], known: Iterable[str]) -> list[str]:
    """The tasks to ask: those given, else all found.

    Raises:
        SnapKVError: there is no such task, or no file of it.
    """
    known = list(known)
    for task in given or []:
        if task not in known:
            raise SnapKVError(f"--task must be one of {', '.join(known)}, got {task!r}")
        if task not in found:
            raise SnapKVError(f"--task {task}: the folder of --data has no file of it")
    return list(dict.fromkeys(given or found))


def fingerprint(paths: Iterable[Path]) -> str:
    """Tells one copy of the data from another by the files' names and sizes."""
    text = json.dumps(sorted((path.name, path.stat().st_size) for path in set(paths)))
    return "sha256 " + hashlib.sha256(text.encode()).hexdigest()[:16]


def read_rows(
    path: Path, fields: Mapping[str, str], only: tuple[str, str] | None = None
) -> Iterator[Row]:
    """The rows of a file, in its order.

    Args:
        fields: what every row must have: TEXT, NUMBER or TEXTS by name.
        only: of a parquet file, a field and its value in the rows wanted.

    Raises:
        SnapKVError: the file can't be read, is damaged or lacks a field; the message names the row.
    """
    read = {".jsonl": _lines, ".json": _list}.get(path.suffix)
    try:
        found = _parquet(path, only) if read is None else read(path)
        number = 0
        for number, row in enumerate(found, start=1):
            yield _checked(row, fields, f"{path}: row {number}")
        if not number:
            raise SnapKVError(
                f"{path} has no rows: get the file again, or take it out of the folder"
            )
    except OSError as error:
        raise SnapKVError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SnapKVError(f"{path} is not UTF-8 text: get the file again") from error


def texts_in(path: Path, field: str) -> list[str]:
    """The texts that a field of a parquet file has, each once; none if there is no such field."""
    if field not in _arrow(path, "read_schema").names:
        return []
    rows = _arrow(path, "read_table", columns=[field]).to_pylist()
    return list(dict.fromkeys(str(row[field]) for row in rows))


def read_json(path: Path) -> Any:
    """Raises: SnapKVError: it can't be read, or is no JSON."""
    try:
        return _parsed(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SnapKVError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise SnapKVError(f"{path} is damaged: it is no JSON, so get it again") from error


def limited(rows: Iterator[Row], most: int | None) -> Iterator[tuple[int, Row]]:
    """The first rows, with their places."""
    return enumerate(itertools.islice(rows, most))


def require(package: str, what: str) -> Any:
    """The package; SnapKVError if it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise SnapKVError(
            f"{what} needs {package}, which is not installed: pip install 'mlx-snapkv[data]'"
        ) from None


def _lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield _parsed(line)
                except ValueError:
                    raise SnapKVError(
                        f"{path}: line {number} is damaged: get the file again, or delete that line"
                    ) from None


def _parsed(text: str) -> Any:
    """Raises: ValueError: it is no JSON, or has halves of characters in it, which no tokenizer takes."""
    try:
        found = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if "\\ud" in text.lower():
        json.dumps(found, ensure_ascii=False).encode()
    return found


def _list(path: Path) -> Iterator[Any]:
    rows = read_json(path)
    if not isinstance(rows, list):
        raise SnapKVError(f"{path} is no JSON list of rows")
    return iter(rows)


def _parquet(path: Path, only: tuple[str, str] | None) -> Iterator[Any]:
    chosen = None if only is None else [(only[0], "=", only[1])]
    table = _arrow(path, "read_table", filters=chosen)
    for batch in table.to_batches(max_chunksize=16):
        yield from batch.to_pylist()


def _arrow(path: Path, function: str, **options: Any) -> Any:
    """What a function of pyarrow.parquet makes of a file."""
    arrow = require("pyarrow", f"{path}: a parquet file")
    try:
        return getattr(importlib.import_module("pyarrow.parquet"), function)(path, **options)
    except arrow.ArrowException as error:
        raise SnapKVError(f"{path} is damaged: it is no parquet file, so get it again") from error


def _checked(row: Any, fields: Mapping[str, str], where: str) -> Row:
    for name, kind in fields.items():
        if not isinstance(row, dict) or name not in row:
            raise SnapKVError(f"{where} has no {name!r}: it is not of this data set")
        if not _is(row[name], kind):
            raise SnapKVError(f"{where}: {name!r} must be {kind}, got {str(row[name])[:40]!r}")
    return row


def _is(value: Any, kind: str) -> bool:
    if kind == TEXTS:
        return isinstance(value, list) and bool(value) and all(isinstance(x, str) for x in value)
    if kind in (TEXT, SOME_TEXT):
        return isinstance(value, str) and bool(value or kind == TEXT)
    return isinstance(value, int) and (kind == NUMBER or value > 0)
