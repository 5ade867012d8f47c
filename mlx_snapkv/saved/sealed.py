"""safetensors files as mlx-lm's `save_prompt_cache` writes them, with a checksum in their metadata.

The checksum covers every byte but its own digits, which stand in the file's head.
"""

import contextlib
import io
import json
import math
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import SnapKVError
from ..paths import reason

KEY = "checksum"
UNKNOWN = "0" * 8  # the digits until the checksum is known
TEMPORARY = re.compile(r"\..+\.[0-9]+\.safetensors")  # the name of an unfinished file
_DIGITS = re.compile(rb'"0\.checksum": ?"([0-9a-f]{8})"')
_PIECE = 1 << 20  # bytes: few enough to be still in the processor's cache when they are written
_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


def metadata(path: Path) -> dict[str, str]:
    """The metadata that mlx-lm's `save_prompt_cache` was given, after the head is checked against the file's size.

    Raises:
        SnapKVError: the file can't be read, is cut short, or is something else.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= size - 8 else b""
    except (OSError, ValueError) as error:
        raise SnapKVError(f"{path} can't be read: {reason(error)}") from error
    try:
        entries = json.loads(text)
        found = entries.pop("__metadata__")
        end = 8 + length + _arrays_length(entries)
        given = {k.removeprefix("0."): v for k, v in found.items() if k.startswith("0.")}
        names_caches = "1.0" in found and all(isinstance(v, str) for v in found.values())
    except Exception as error:  # whatever the file has there
        raise SnapKVError(f"{path} is not a saved prompt cache, or it is damaged") from error
    if not names_caches:
        raise SnapKVError(f"{path} is not a saved prompt cache: it names no caches")
    if size != end:
        raise SnapKVError(f"{path} is damaged: it should have {end:,} bytes and has {size:,}")
    return given


def _arrays_length(entries: dict[str, Any]) -> int:
    """Bytes of the arrays behind the head. Raises: ValueError: they overlap, leave gaps, or have other sizes."""
    end = 0
    for entry in sorted(entries.values(), key=lambda e: e["data_offsets"]):
        start, stop = entry["data_offsets"]
        if start != end or stop - start != math.prod(entry["shape"]) * _BYTES[entry["dtype"]]:
            raise ValueError("array sizes disagree")
        end = stop
    return end


class SealedWriter:
    """A new file that mlx writes from its first byte to its last; the checksum is computed on the way.

    The metadata have UNKNOWN for the checksum until `seal`.
    """

    def __init__(self, file: BinaryIO):
        self._file = file
        self._head = b""  # what has been written, until the head is complete
        self._place: int | None = None  # of the digits, known from then on
        self._crc = 0

    @property
    def closed(self) -> bool:
        return self._file.closed

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, *where: int) -> int:
        """Raises: io.UnsupportedOperation: bytes written twice would count twice."""
        raise io.UnsupportedOperation("this file is written in order")

    def write(self, data: bytes | memoryview) -> int:
        data = memoryview(data)
        for start in range(0, len(data), _PIECE):
            piece = data[start : start + _PIECE]
            if self._place is not None:
                self._crc = zlib.crc32(piece, self._crc)
            else:
                self._head += piece
                if len(self._head) >= 8 and len(self._head) >= _head_length(self._head):
                    self._place, self._crc = _start(self._head)
            self._file.write(piece)
        return len(data)

    def seal(self) -> None:
        """Write the checksum, once everything else is written. Raises: ValueError: there is no place for it."""
        if self._place is None:
            raise ValueError("no head")
        self._file.seek(self._place)
        self._file.write(_digits(self._crc))


@contextlib.contextmanager
def sealed(target: Path) -> Iterator[Any]:
    """A `SealedWriter` for the block, whose file is sealed and takes the place of `target` at the end.

    Raises:
        OSError: it can't be written; a file that was there before still is.
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
    """Bytes before the arrays, from the file's first 8."""
    return 8 + int.from_bytes(start[:8], "little")


def _start(head: bytes) -> tuple[int, int]:
    """Where the digits are, and the checksum of the rest of these bytes. Raises: ValueError: there are none."""
    found = _DIGITS.search(head)
    if found is None:
        raise ValueError("no checksum")
    start, end = found.span(1)
    return start, zlib.crc32(head[end:], zlib.crc32(head[:start]))


def _digits(crc: int) -> bytes:
    return f"{crc:08x}".encode()
