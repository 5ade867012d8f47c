"""Files that users name: checked before the work, and written as a whole or not at all."""

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
    """The path of that name, which an option may have given; SnapKVError if its home folder is not there."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        given = name if option is None else f"{option} {name}"
        raise SnapKVError(f"{given}: no such home folder") from error


def require_place(path: Path) -> bool:
    """Whether a file is there already, which writing would replace; SnapKVError if none can be written there."""
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
    """What went wrong with a file, without its name."""
    return getattr(error, "strerror", None) or str(error)


def put(path: Path, data: str | bytes) -> None:
    """Write a file, which is there as a whole or as it was before. Raises: OSError."""
    with replacing(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give the block a file to write, which then takes the place of `path`. Raises: OSError: `path` is as it was."""
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{secrets.token_hex(6)}.part")  # however long the name is
    try:
        yield temporary
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


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Raises: SnapKVError: the system refused a file of the user's, who named it `what`."""
    try:
        yield
    except SnapKVError:
        raise
    except (OSError, ValueError) as error:  # the latter of names that no file can have
        raise SnapKVError(f"{what}: {reason(error)}") from error
