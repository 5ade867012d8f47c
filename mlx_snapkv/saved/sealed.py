"""Seal mlx-lm's files of prompt caches by a checksum of all bytes in the metadata, with zeros in its own place."""

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
UNKNOWN = "0" * 8  # takes the place of the digits until the checksum is known
_CHECKSUM_FIELD = re.compile(rb'"0\.checksum": ?"([0-9a-f]{8})"')
_IO_BYTES = 1 << 20  # bytes hashed and written at a time; they fit into a processor's cache


def metadata(path: Path) -> dict[str, str]:
    """Return the metadata that `save_prompt_cache` was given.

    Raises: SnapKVError: the file can't be read, is cut off, or is not a saved prompt cache.
    """
    with refusing(f"{path} can't be read"), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = _head(file)
    try:
        arrays = json.loads(head[8:])
        texts = arrays.pop("__metadata__")
        expected_size = len(head) + max(array["data_offsets"][1] for array in arrays.values())
        # mlx-lm puts the caller's metadata under "0.", and the names of the caches' classes under "1.".
        if "1.0" not in texts or not all(isinstance(value, str) for value in texts.values()):
            raise ValueError("it names no caches")
        own_texts = {k.removeprefix("0."): v for k, v in texts.items() if k.startswith("0.")}
    except Exception as error:  # a foreign or damaged file may hold anything
        raise SnapKVError(f"{path} is not a saved prompt cache, or it is damaged") from error
    if size != expected_size:
        raise SnapKVError(
            f"{path} is damaged: it should have {expected_size:,} bytes, but has {size:,}"
        )
    return own_texts


class SealedWriter(io.BufferedWriter):
    """A file writer that computes the checksum of all bytes; the file must be written in order."""

    crc = 0

    def write(self, data: Any) -> int:
        """Write bytes and add them to the checksum; return their number."""
        data = memoryview(data)
        for start in range(0, len(data), _IO_BYTES):
            piece = data[start : start + _IO_BYTES]
            self.crc = zlib.crc32(piece, self.crc)
            super().write(piece)
        return len(data)


@contextlib.contextmanager
def open_writer(target: Path) -> Iterator[Any]:
    """Yield a writer; after the block, the checksum replaces UNKNOWN in the file, which then replaces `target`.

    Raises: OSError: the file can't be written; an earlier `target` is unchanged.
    """
    with replacing(target) as temporary:
        with SealedWriter(temporary.open("wb", buffering=0)) as writer:
            yield writer
        with temporary.open("r+b") as file:
            file.seek(_checksum_place(_head(file)))
            file.write(_digits(writer.crc))


def has_valid_checksum(path: Path) -> bool:
    """Return whether every byte is as it was when the file was sealed; False if the file can't be read."""
    with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
        head = _head(file)
        place = _checksum_place(head)
        end = place + len(UNKNOWN)
        crc = zlib.crc32(head[:place] + UNKNOWN.encode() + head[end:])
        while piece := file.read(_IO_BYTES):
            crc = zlib.crc32(piece, crc)
        return head[place:end] == _digits(crc)
    return False


def _head(file: BinaryIO) -> bytes:
    """Return the bytes before the arrays; the first 8 bytes are the length of the others.

    A length beyond the file's end, as another kind of file may have, is not read.
    """
    head = file.read(8)
    length = int.from_bytes(head, "little")
    if length >= os.fstat(file.fileno()).st_size:
        return head
    return head + file.read(length)


def _checksum_place(head: bytes) -> int:
    """Return the place of the checksum's first digit. Raises: ValueError: there is no checksum."""
    match = _CHECKSUM_FIELD.search(head)
    if match is None:
        raise ValueError("no checksum")
    return match.start(1)


def _digits(crc: int) -> bytes:
    """Return the eight digits of a checksum."""
    return f"{crc:08x}".encode()
