"""The files of results: which of them this package's commands have written, for only those are ever replaced."""

import io
import re
from pathlib import Path
from typing import Any

from ..errors import SnapKVError
from ..paths import put_result

# What stands near a file's beginning. Whoever goes on from a .jsonl file looks for itself.
_COMMAND = rb"(mlx-snapkv|python scripts/evaluate\.py) "
_MARKS = {
    ".json": rb'"command": "' + _COMMAND,
    ".md": rb"\nWritten by `" + _COMMAND,
    ".png": rb"Software\0mlx-snapkv",
    ".html": rb'<meta name="generator" content="mlx-snapkv">',
}
_BEGINNING = 1024  # bytes


def is_ours(path: Path) -> bool:
    """Whether a file of a result was written by a command of this package."""
    mark = _MARKS.get(path.suffix, b"")
    with path.open("rb") as file:
        return re.search(mark, file.read(_BEGINNING)) is not None


def put_figure(path: Path, figure: Any, dpi: int = 120) -> None:
    """Write one of matplotlib's figures as a file of this package."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=dpi, metadata={"Software": "mlx-snapkv"})
    put_result(path, picture.getvalue())


def require_matplotlib() -> None:
    """Raises: SnapKVError: matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise SnapKVError(
            "plots need matplotlib: run pip install 'mlx-snapkv[plots]', or drop --output"
        ) from None
