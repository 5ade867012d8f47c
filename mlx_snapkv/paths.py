"""Check output paths before any work is done, and write files atomically."""

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from .errors import SnapKVError

UNFINISHED = re.compile(r"\.[0-9a-f]{12}\.part")  # matches `replacing`'s temporary files


def path_of(name: str | Path, option: str | None = None) -> Path:
    """Convert a file name to a path and expand "~" to the home folder.

    Args:
        name: an absolute path, or a path relative to the current folder.
        option: name of an option to mention in the error message.

    Raises: SnapKVError: the home folder can't be found.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        named = name if option is None else f"{option} {name}"
        raise SnapKVError(f"{named}: no such home folder") from error


def require_place(path: Path) -> bool:
    """Check that a file can be written to `path`, and return whether it already exists.

    Raises: SnapKVError: no file can be written there.
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
        raise SnapKVError(f"{path} is not a regular file: give another name")
    if not folder.is_dir():
        raise SnapKVError(f"{path} can't be written: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise SnapKVError(f"{path} can't be written: the folder {folder} is read-only")
    if mode is not None and not os.access(path, os.W_OK):
        raise SnapKVError(f"{path} can't be written: it is read-only")
    return mode is not None


def reason(error: Exception) -> str:
    """Return an error's message without the file name."""
    return getattr(error, "strerror", None) or str(error)


def put(path: Path, data: str | bytes) -> None:
    """Write a file atomically. Raises: OSError."""
    with replacing(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path, and move the file written there to `path` after the `with` block.

    Raises: OSError: the file can't be written. `path` is left unchanged.
    """
    target = Path(os.path.realpath(path))
    # Don't derive the temporary name from the target's name, which may already have the maximum length.
    temporary = target.with_name(f".{secrets.token_hex(6)}.part")
    try:
        yield temporary
        with contextlib.suppress(OSError):
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))  # keep the replaced file's mode
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def put_result(path: Path, data: str | bytes) -> None:
    """Write a file atomically. Raises: OSError, with a message that names the file."""
    with naming(path):
        put(path, data)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Replace the message of any OSError raised in the `with` block with "PATH can't be written: REASON"."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{path} can't be written: {reason(error)}") from error


@contextlib.contextmanager
def refusing(beginning: str) -> Iterator[None]:
    """Convert any OSError or ValueError raised in the `with` block to a SnapKVError.

    Args:
        beginning: start of the error message, such as "FILE can't be written".
    """
    try:
        yield
    except SnapKVError:
        raise
    except (OSError, ValueError) as error:  # ValueError is raised if the name contains a null byte
        raise SnapKVError(f"{beginning}: {reason(error)}") from error
