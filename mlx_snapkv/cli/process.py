"""The process: its standard streams, closed, full or not read, its end, and Ctrl-C while it starts."""

import contextlib
import os
import resource
import signal
import sys
from typing import Any, NoReturn, TextIO

MANY_FILES = 4096


def hold_standard_descriptors() -> None:
    """Open those of 0, 1 and 2 that are closed on nothing: the next file opened would get their number otherwise."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def allow_many_files() -> None:
    """Let the process open 4,096 files if the system does: a Mac's shells allow 256, and a book takes four a layer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < MANY_FILES:
        most = MANY_FILES if hard == resource.RLIM_INFINITY else min(MANY_FILES, hard)
        with contextlib.suppress(OSError, ValueError):  # opening a file then fails with a sentence
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Stderr:
    """Standard error for progress and figures: what can't be written there is dropped."""

    def __init__(self, stream: TextIO | None):
        self._stream = stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Silence(Stderr):
    """A stream that goes nowhere, in the place of one that errors still go to."""

    def __init__(self, instead_of: TextIO):
        super().__init__(None)
        self.instead_of = instead_of


def be_silent() -> None:
    """Print nothing but errors (see `speak`): rank 0 prints the rest."""
    nowhere: Any = Silence(sys.stderr)
    sys.stdout = sys.stderr = nowhere


def speak() -> None:
    """Print errors again."""
    if isinstance(sys.stderr, Silence):
        sys.stderr = sys.stderr.instead_of


def leave(status: int) -> NoReturn:
    """Exit with this status, or 1 if what was printed can't be written."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os._exit(status or 1)  # the usual exit would try again
    sys.exit(status)


def stop_at_once() -> None:
    """Let Ctrl-C end the process, until `listen`: libraries may not be left half imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def listen() -> None:
    """Let Ctrl-C be a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _stop(*_: Any) -> None:
    os.write(2, b"\nmlx-snapkv: stopped\n")
    os._exit(130)
