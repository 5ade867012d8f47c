"""Process setup for commands: standard streams, exit status, open files, and Ctrl-C during imports."""

import contextlib
import io
import os
import resource
import signal
import sys
from typing import Any, NoReturn, TextIO

MAX_OPEN_FILES = 4096  # macOS shells allow 256, and --store file opens four files per layer


def open_standard_descriptors() -> None:
    """Open the null device for each closed standard descriptor.

    Otherwise, the next file that is opened would get the descriptor's number, and messages for the closed stream could
    be written to that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


def replace_unencodable_characters() -> None:
    """Make stdout print "?" for characters that its encoding lacks, instead of failing.

    UTF-8 can encode any character. An error handler set by the user, such as
    `PYTHONIOENCODING=cp1252:xmlcharrefreplace`, is kept.
    """
    stdout = sys.stdout
    if not isinstance(stdout, io.TextIOWrapper) or stdout.encoding.lower() in ("utf-8", "utf8"):
        return
    if stdout.errors in ("strict", "surrogateescape"):
        stdout.reconfigure(errors="replace")


def allow_many_files() -> None:
    """Raise the open-file limit to `MAX_OPEN_FILES`, or as far as the system allows."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY or soft_limit >= MAX_OPEN_FILES:
        return
    new_limit = MAX_OPEN_FILES
    if hard_limit != resource.RLIM_INFINITY:
        new_limit = min(new_limit, hard_limit)
    # If the limit can't be raised, opening files may fail later.
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (new_limit, hard_limit))


class Stderr:
    """Wrapper around standard error that ignores write errors, so that printing progress can't end the command."""

    def __init__(self, stream: TextIO | None):
        """Wrap a stream. If it is closed (None), drop all text."""
        self._stream = stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    def write(self, text: str) -> int:
        """Write text, ignoring errors, and return its length."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, ignoring errors."""
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        """Forward any other attribute to the stream."""
        return getattr(self._stream, name)


class SilentStream(Stderr):
    """Stream that drops all text and remembers the stream that it replaces."""

    def __init__(self, replaced: TextIO):
        """Store the replaced stream."""
        super().__init__(None)
        self.replaced = replaced


def silence_output() -> None:
    """Drop all output to stdout and stderr. Ranks other than 0 do this, because rank 0 prints for all."""
    silent: Any = SilentStream(sys.stderr)
    sys.stdout = sys.stderr = silent


def restore_stderr() -> None:
    """Restore stderr after `silence_output`, to print an error."""
    if isinstance(sys.stderr, SilentStream):
        sys.stderr = sys.stderr.replaced


def exit_process(status: int) -> NoReturn:
    """Flush stdout and exit with `status`. If stdout can't be written, status 0 becomes 1."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os._exit(status or 1)  # sys.exit would flush again, and fail
    sys.exit(status)


def exit_on_interrupt() -> None:
    """Make Ctrl-C end the process instead of raising KeyboardInterrupt.

    An exception during an import would leave the library half imported. After the imports, `raise_on_interrupt`
    restores the usual behaviour.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _print_and_exit)


def raise_on_interrupt() -> None:
    """Make Ctrl-C raise KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _print_and_exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _print_and_exit(*_: Any) -> None:
    stderr_descriptor = 2
    os.write(stderr_descriptor, b"\nmlx-snapkv: stopped\n")
    os._exit(130)
