"""The checksum of a saved file: of every byte but its own digits, which stand in the file's head."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

KEY = "checksum"
UNKNOWN = "0" * 8  # the digits while they are not known
_DIGITS = re.compile(rb'"0\.checksum": ?"([0-9a-f]{8})"')
_PIECE = 1 << 24  # bytes


def seal(path: Path) -> None:
    """Put the checksum into a file that was written with UNKNOWN for it."""
    digits, place = _checksum(path)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(digits)


def is_whole(path: Path) -> bool:
    """Whether every byte is as it was when the file was sealed."""
    try:
        digits, place = _checksum(path)
    except (OSError, ValueError):
        return False
    with path.open("rb") as file:
        file.seek(place)
        return file.read(len(digits)) == digits


def _checksum(path: Path) -> tuple[bytes, int]:
    """The checksum's digits, as they should be, and their place in the file.

    Raises:
        ValueError: the head has no place for them.
    """
    with path.open("rb") as file:
        size = file.read(8)
        head = file.read(int.from_bytes(size, "little"))
        found = _DIGITS.search(head)
        if found is None:
            raise ValueError("no checksum")
        crc = zlib.crc32(size + head[: found.start(1)] + head[found.end(1) :])
        while piece := file.read(_PIECE):
            crc = zlib.crc32(piece, crc)
    return f"{crc:08x}".encode(), 8 + found.start(1)
