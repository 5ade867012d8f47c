"""Writing files that are there as a whole, or as they were before."""

from __future__ import annotations

import contextlib
import io
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .paths import reason


def put(path: Path, data: str | bytes) -> None:
    """Write a file, which is there as a whole or as it was before. Raises: OSError."""
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{secrets.token_hex(6)}.part")  # however long the name is
    try:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)
        with contextlib.suppress(OSError):
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))  # of one that it replaces
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def put_result(path: Path, data: str | bytes) -> None:
    """The same of a result. Raises: OSError: with a sentence that names the file."""
    with naming(path):
        put(path, data)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Raises: OSError: what the block raised, as a sentence that names the file it wrote."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{path} can't be written: {reason(error)}") from error


def put_figure(path: Path, figure: Any, **options: Any) -> None:
    """The same of one of matplotlib's figures."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", **options)
    put_result(path, picture.getvalue())
