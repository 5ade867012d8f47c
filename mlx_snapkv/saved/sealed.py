"""Seal prompt caches in mlx-lm's file format with a checksum of all bytes."""

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
UNKNOWN = "0" * 8  # replaces the checksum's digits while it is computed
_CHECKSUM_FIELD = re.compile(rb'"0\.checksum": ?"([0-9a-f]{8})"')
_IO_BYTES = 1 << 20  # bytes hashed and written at a time, which fit into a processor's cache


def metadata(path: Path) -> dict[str, str]:
    """Return the metadata that was passed to `save_prompt_cache`.

    Raises: SnapKVError: the file can't be read, is truncated, or is not a saved prompt cache.
    """
    with refusing(f"{path} can't be read"), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = _head(file)
    try:
        arrays = json.loads(head[8:])
        texts = arrays.pop("__metadata__")
        expected_size = len(head) + max(array["data_offsets"][1] for array in arrays.values())
        # mlx-lm stores the caller's metadata under "0.", and the names of the caches' classes under "1.".
        if "1.0" not in texts or not all(isinstance(value, str) for value in texts.values()):
            raise ValueError("it names no caches")
        own_texts = {k.removeprefix("0."): v for k, v in texts.items() if k.startswith("0.")}
    except Exception as error:  # foreign or damaged files may contain anything
        raise SnapKVError(f"{path} is not a saved prompt cache, or it is damaged") from error
    if size != expected_size:
        raise SnapKVError(
            f"{path} is damaged: it should have {expected_size:,} bytes, but has {size:,}"
        )
    return own_texts


class SealedWriter(io.BufferedWriter):
    """A file writer that computes the checksum of all bytes. The file must be written sequentially."""

    crc = 0

    def write(self, data: Any) -> int:
        """Write bytes, add them to the checksum, and return their number."""
        data = memoryview(data)
        for start in range(0, len(data), _IO_BYTES):
            piece = data[start : start + _IO_BYTES]
            self.crc = zlib.crc32(piece, self.crc)
            super().write(piece)
        return len(data)


@contextlib.contextmanager
def open_writer(target: Path) -> Iterator[Any]:
    """Yield a writer. After the `with` block, insert the checksum, and replace `target` by the new file.

    Raises: OSError: the file can't be written; an existing `target` is unchanged.
    """
    with replacing(target) as temporary:
        with SealedWriter(temporary.open("wb", buffering=0)) as writer:
            yield writer
        with temporary.open("r+b") as file:
            file.seek(_checksum_place(_head(file)))
            file.write(_digits(writer.crc))


def has_valid_checksum(path: Path) -> bool:
    """Return whether the checksum of a file is valid; False if the file can't be read."""
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
    """Return the bytes before the arrays. The first 8 bytes are the length of the rest.

    Nothing is read if the length exceeds the file, as it may in files of another kind.
    """
    head = file.read(8)
    length = int.from_bytes(head, "little")
    if length >= os.fstat(file.fileno()).st_size:
        return head
    return head + file.read(length)


def _checksum_place(head: bytes) -> int:
    """Return the offset of the checksum's first digit. Raises: ValueError: there is no checksum."""
    match = _CHECKSUM_FIELD.search(head)
    if match is None:
        raise ValueError("no checksum")
    return match.start(1)


def _digits(crc: int) -> bytes:
    """Return the eight digits of a checksum."""
    return f"{crc:08x}".encode()
