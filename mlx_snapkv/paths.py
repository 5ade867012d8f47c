"""Files by the names that users give: what they stand for, and places to write to, checked before the work."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from .errors import SnapKVError


def path_of(name: str | Path, option: str | None = None) -> Path:
    """The path of that name, which an option may have given; SnapKVError if its home folder is not there."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        given = name if option is None else f"{option} {name}"
        raise SnapKVError(f"{given}: no such home folder") from error


def require_place(path: Path) -> bool:
    """Whether a file is there already, which writing would replace.

    Raises:
        SnapKVError: no file can be written there.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = None
    except (OSError, ValueError) as error:
        raise SnapKVError(f"{path} can't be written: {reason(error)}") from error
    folder = Path(os.path.realpath(path)).parent
    if mode is not None and stat.S_ISDIR(mode):
        raise SnapKVError(f"{path} is a folder: give a file name")
    if mode is not None and not stat.S_ISREG(mode):
        raise SnapKVError(f"{path} is no regular file: give another name")
    if not folder.is_dir():
        raise SnapKVError(f"{path} can't be written: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise SnapKVError(f"{path} can't be written: the folder {folder} is read-only")
    if mode is not None and not os.access(path, os.W_OK):
        raise SnapKVError(f"{path} can't be written: it is read-only")
    return mode is not None


def reason(error: Exception) -> str:
    """What went wrong with a file, without its name."""
    return getattr(error, "strerror", None) or str(error)
