"""Standard streams that are closed, full or not read."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, TextIO


def hold_standard_descriptors() -> None:
    """Open those of 0, 1 and 2 that are closed on nothing: the next file opened would get their number otherwise."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


class Telling:
    """Standard error for progress and figures: what can't be written there costs nothing else."""

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


class Silent(io.StringIO):
    """Takes what is written, and shows it to nobody.

    Attributes:
        before: the stream in whose place it is.
    """

    def __init__(self, before: Any):
        super().__init__()
        self.before = before

    def write(self, text: str) -> int:
        return len(text)


def be_silent() -> None:
    """Print nothing more: another process does."""
    if not isinstance(sys.stderr, Silent):
        sys.stdout, sys.stderr = Silent(sys.stdout), Silent(sys.stderr)  # type: ignore[assignment]


def speak() -> None:
    """Print errors again."""
    if isinstance(sys.stderr, Silent):
        sys.stderr = sys.stderr.before


def leave(status: int) -> None:
    """Exit with this status, or 1 if what was printed can't be written."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os._exit(status or 1)  # the usual exit would try again
    sys.exit(status)
