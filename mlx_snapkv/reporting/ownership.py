"""Which files this package's commands have written: only those are ever replaced."""

from __future__ import annotations

from pathlib import Path

PNG_METADATA = {"Software": "mlx-snapkv"}

# What stands near a file's beginning; a .jsonl file is told by whoever goes on from it.
_MARKS = {
    ".json": b'"command": "mlx-snapkv ',
    ".md": b"\nWritten by `mlx-snapkv ",
    ".png": b"Software\0mlx-snapkv",
    ".html": b'<meta name="generator" content="mlx-snapkv">',
}
_BEGINNING = 1024  # bytes


def is_ours(path: Path) -> bool:
    """Whether a file of a result was written by a command of this package."""
    mark = _MARKS.get(path.suffix, b"")
    with path.open("rb") as file:
        return mark in file.read(_BEGINNING)
