"""Check files that users name before the work begins, and write them completely or not at all."""

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from .errors import SnapKVError

UNFINISHED = re.compile(r"\.[0-9a-f]{12}\.part")  # the name of a file that `replacing` has written


def path_of(name: str | Path, option: str | None = None) -> Path:
    """Return a name's path, with "~" replaced by the home folder.

    Args:
        name: a path, absolute or relative to the current folder.
        option: the option that the name was given for, for the error's sentence.

    Raises: SnapKVError: there is no such home folder.
    """
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        named = name if option is None else f"{option} {name}"
        raise SnapKVError(f"{named}: no such home folder") from error


def require_place(path: Path) -> bool:
    """Check that a file can be written at `path`, and return whether there is one already.

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
    """Return what went wrong with a file, without the file's name."""
    return getattr(error, "strerror", None) or str(error)


def put(path: Path, data: str | bytes) -> None:
    """Write a file completely, or leave it as it was before. Raises: OSError."""
    with replacing(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path, and rename the file that the block writes there to `path`.

    Raises: OSError: the file can't be written; `path` is unchanged.
    """
    target = Path(os.path.realpath(path))
    # The name does not contain the target's name, which may have the maximum length.
    temporary = target.with_name(f".{secrets.token_hex(6)}.part")
    try:
        yield temporary
        with contextlib.suppress(OSError):
            temporary.chmod(stat.S_IMODE(target.stat().st_mode))  # keep the mode of a replaced file
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def put_result(path: Path, data: str | bytes) -> None:
    """Write a file as `put` does. Raises: OSError: a sentence that names the file."""
    with naming(path):
        put(path, data)


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn an OSError of the block into an OSError whose sentence names the file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{path} can't be written: {reason(error)}") from error


@contextlib.contextmanager
def refusing(beginning: str) -> Iterator[None]:
    """Turn an OSError or ValueError of the block into a SnapKVError.

    Args:
        beginning: the beginning of the error's sentence, such as "FILE can't be written".
    """
    try:
        yield
    except SnapKVError:
        raise
    except (OSError, ValueError) as error:  # ValueError: the name has a zero byte
        raise SnapKVError(f"{beginning}: {reason(error)}") from error
