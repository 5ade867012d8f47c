"""mlx-lm's files of prompt caches with a checksum in their metadata: that of all bytes, its own digits as zeros."""

import contextlib
import io
import json
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import SnapKVError
from ..paths import refusing, replacing

CHECKSUM_KEY = "checksum"
UNKNOWN = "0" * 8  # the digits until the checksum is known
_CHECKSUM_FIELD = re.compile(rb'"0\.checksum": ?"([0-9a-f]{8})"')
_IO_BYTES = 1 << 20  # bytes: few enough to be still in the processor's cache when they are written


def metadata(path: Path) -> dict[str, str]:
    """What `save_prompt_cache` was given. Raises: SnapKVError: the file can't be read, or is cut or something else."""
    with refusing(f"{path} can't be read"), path.open("rb") as file:
        size, head = os.fstat(file.fileno()).st_size, _head(file)
    try:
        entries = json.loads(head[8:])
        found = entries.pop("__metadata__")
        end = len(head) + max(entry["data_offsets"][1] for entry in entries.values())
        given = {k.removeprefix("0."): v for k, v in found.items() if k.startswith("0.")}
        if "1.0" not in found or not all(isinstance(value, str) for value in found.values()):
            raise ValueError("it names no caches")
    except Exception as error:  # whatever the file has there
        raise SnapKVError(f"{path} is not a saved prompt cache, or it is damaged") from error
    if size != end:
        raise SnapKVError(f"{path} is damaged: it should have {end:,} bytes, but has {size:,}")
    return given


class SealedWriter(io.BufferedWriter):
    """A file whose checksum is computed as it is written, from its first byte to its last."""

    crc = 0

    def write(self, data: Any) -> int:
        """Write bytes, and count them into the checksum."""
        data = memoryview(data)
        for start in range(0, len(data), _IO_BYTES):
            piece = data[start : start + _IO_BYTES]
            self.crc = zlib.crc32(piece, self.crc)
            super().write(piece)
        return len(data)


@contextlib.contextmanager
def sealed(target: Path) -> Iterator[Any]:
    """A writer for the block, whose file then gets its checksum, where it has UNKNOWN, and takes the place of `target`.

    Raises: OSError: it can't be written; a file that was there before still is.
    """
    with replacing(target) as temporary:
        with SealedWriter(temporary.open("wb", buffering=0)) as writer:
            yield writer
        with temporary.open("r+b") as file:
            file.seek(_place(_head(file)))
            file.write(_digits(writer.crc))


def is_whole(path: Path) -> bool:
    """Whether every byte is as it was when the file was sealed."""
    with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
        head = _head(file)
        place = _place(head)
        end = place + len(UNKNOWN)
        crc = zlib.crc32(head[:place] + UNKNOWN.encode() + head[end:])
        while piece := file.read(_IO_BYTES):
            crc = zlib.crc32(piece, crc)
        return head[place:end] == _digits(crc)
    return False


def _head(file: BinaryIO) -> bytes:
    """The bytes before the arrays, of the length that the first 8 say."""
    head = file.read(8)
    length = int.from_bytes(head, "little")
    return head + (file.read(length) if length < os.fstat(file.fileno()).st_size else b"")


def _place(head: bytes) -> int:
    """Where the digits are. Raises: ValueError: there are none."""
    found = _CHECKSUM_FIELD.search(head)
    if found is None:
        raise ValueError("no checksum")
    return found.start(1)


def _digits(crc: int) -> bytes:
    return f"{crc:08x}".encode()
