"""The checksum of a saved file: of every byte but its own digits, which stand in the file's head."""

import contextlib
import io
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

KEY = "checksum"
UNKNOWN = "0" * 8  # the digits while they are not known
TEMPORARY = re.compile(r"\..+\.[0-9]+\.safetensors")  # the name of a file that is not whole yet
_DIGITS = re.compile(rb'"0\.checksum": ?"([0-9a-f]{8})"')
_PIECE = 1 << 20  # bytes: few enough to be still in the processor's cache when they are written


class SealedWriter:
    """A file for mlx to write to, from its first byte to its last, that counts the checksum on the way.

    Args:
        file: a new file. The head that is written to it has UNKNOWN for the checksum, until `seal`.
    """

    def __init__(self, file: BinaryIO):
        self._file = file
        self._head = b""  # what has been written, until the head is whole
        self._place: int | None = None  # of the digits, known from then on
        self._crc = 0

    @property
    def closed(self) -> bool:
        return self._file.closed

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, *where: int) -> int:
        """Raises: io.UnsupportedOperation: bytes written twice would be counted twice."""
        raise io.UnsupportedOperation("this file is written in order")

    def write(self, data: bytes | memoryview) -> int:
        data = memoryview(data)
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE]
            self._count(piece)
            self._file.write(piece)
        return len(data)

    def seal(self) -> None:
        """Put the checksum in its place, once everything is written; ValueError if there is no place for it."""
        if self._place is None:
            raise ValueError("no head")
        self._file.seek(self._place)
        self._file.write(_digits(self._crc))

    def _count(self, piece: memoryview) -> None:
        if self._place is not None:
            self._crc = zlib.crc32(piece, self._crc)
            return
        self._head += piece
        if len(self._head) >= 8 and len(self._head) >= _head_length(self._head):
            self._place, self._crc = _start(self._head)
            self._head = b""


@contextlib.contextmanager
def sealed(target: Path) -> Iterator[Any]:
    """A `SealedWriter` for the block, which is sealed and put in the place of `target` when that is left.

    Raises:
        OSError: it can't be written; what was there before still is.
    """
    temporary = target.with_name(f".{target.stem}.{os.getpid()}.safetensors")
    try:
        with temporary.open("wb") as file:
            writer = SealedWriter(file)
            yield writer
            writer.seal()
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def is_whole(path: Path) -> bool:
    """Whether every byte is as it was when the file was sealed."""
    try:
        with path.open("rb") as file:
            head = file.read(8)
            head += file.read(min(_head_length(head) - 8, path.stat().st_size))
            place, crc = _start(head)
            while piece := file.read(_PIECE):
                crc = zlib.crc32(piece, crc)
    except (OSError, ValueError):
        return False
    return head[place : place + len(UNKNOWN)] == _digits(crc)


def _head_length(start: bytes) -> int:
    """Bytes of a safetensors file before its arrays, told by its first 8."""
    return 8 + int.from_bytes(start[:8], "little")


def _start(head: bytes) -> tuple[int, int]:
    """Where the digits stand in a file, and the checksum of all that it begins with besides them.

    Raises:
        ValueError: the head has no place for them.
    """
    found = _DIGITS.search(head)
    if found is None:
        raise ValueError("no checksum")
    start, end = found.span(1)
    return start, zlib.crc32(head[end:], zlib.crc32(head[:start]))


def _digits(crc: int) -> bytes:
    return f"{crc:08x}".encode()
