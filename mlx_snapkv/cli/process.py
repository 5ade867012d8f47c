"""The command's process: standard streams that are closed, full or not UTF-8, the exit, and Ctrl-C in the imports."""

import contextlib
import io
import os
import resource
import signal
import sys
from typing import Any, NoReturn, TextIO

MAX_OPEN_FILES = 4096  # a Mac's shells allow 256, and --store file opens four for each layer


def open_standard_descriptors() -> None:
    """Open the null device for each closed descriptor of 0, 1 and 2. Otherwise the next opened file would get it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


def replace_unencodable() -> None:
    """Make stdout write "?" for a letter that its encoding lacks, which would otherwise end the command.

    UTF-8 lacks none. Another error handler, such as one from `PYTHONIOENCODING=cp1252:xmlcharrefreplace`, stays.
    """
    stdout = sys.stdout
    if not isinstance(stdout, io.TextIOWrapper) or stdout.encoding.lower() in ("utf-8", "utf8"):
        return
    if stdout.errors in ("strict", "surrogateescape"):
        stdout.reconfigure(errors="replace")


def allow_many_files() -> None:
    """Raise the limit of open files to `MAX_OPEN_FILES`, or as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MAX_OPEN_FILES:
        return
    limit = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    with contextlib.suppress(OSError, ValueError):  # opening a file reports the error later
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


class Stderr:
    """A wrapper of standard error that ignores write errors: printing progress must not end the command."""

    def __init__(self, stream: TextIO | None):
        """Wrap a stream; if it is closed (None), text is dropped."""
        self._stream = stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    def write(self, text: str) -> int:
        """Write a text if the stream takes it, and return the text's length."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream if it can be written to."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the stream itself."""
        return getattr(self._stream, name)


class SilentStream(Stderr):
    """A stream that drops all text. It remembers the stream that it replaces, for errors."""

    def __init__(self, replaced: TextIO):
        """Drop all text from now on."""
        super().__init__(None)
        self.replaced = replaced


def silence_output() -> None:
    """Drop everything that is printed until `restore_stderr`. Ranks other than 0 do so, since rank 0 prints for all."""
    silent: Any = SilentStream(sys.stderr)
    sys.stdout = sys.stderr = silent


def restore_stderr() -> None:
    """Make stderr print again after `silence_output`, for an error."""
    if isinstance(sys.stderr, SilentStream):
        sys.stderr = sys.stderr.replaced


def exit_process(status: int) -> NoReturn:
    """Flush stdout and exit with this status. Exit with at least 1 if stdout can't be written."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os._exit(status or 1)  # sys.exit would flush again, and fail
    sys.exit(status)


def exit_on_interrupt() -> None:
    """Let Ctrl-C end the process until `raise_on_interrupt`. An exception would leave libraries half imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def raise_on_interrupt() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(*_: Any) -> None:
    os.write(2, b"\nmlx-snapkv: stopped\n")
    os._exit(130)
