"""Adds a checksum of all bytes to files in mlx-lm's prompt-cache format."""

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
UNKNOWN = "0" * 8  # placeholder for the checksum while it is computed
_CHECKSUM_FIELD = re.compile(rb'"0\.checksum": ?"(?P<digits>[0-9a-f]{8})"')
_IO_BYTES = 1 << 20  # number of bytes to hash and write at a time; small enough for a CPU cache


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata that was passed to `save_prompt_cache`.

    Raises: SnapKVError: the file can't be read, is truncated, or is not a saved prompt cache.
    """
    with refusing(f"{path} can't be read"), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        header = _read_header(file)
    try:
        arrays = json.loads(header[8:])  # the first 8 bytes are the length of the rest
        all_metadata = arrays.pop("__metadata__")
        # `data_offsets` contains the array's start and end, counted from the end of the header.
        expected_size = len(header) + max(array["data_offsets"][1] for array in arrays.values())
        # mlx-lm stores the caller's metadata under "0." and the cache class names under "1.".
        are_texts = all(isinstance(value, str) for value in all_metadata.values())
        if "1.0" not in all_metadata or not are_texts:
            raise ValueError("it names no caches")
        metadata = {
            key.removeprefix("0."): text
            for key, text in all_metadata.items()
            if key.startswith("0.")
        }
    except Exception as error:  # foreign or damaged files may contain anything
        raise SnapKVError(f"{path} is not a saved prompt cache, or it is damaged") from error
    if size != expected_size:
        raise SnapKVError(
            f"{path} is damaged: it should have {expected_size:,} bytes, but has {size:,}"
        )
    return metadata


class SealedWriter(io.BufferedWriter):
    """A file writer that computes a checksum of all bytes. The file must be written sequentially."""

    crc = 0

    def write(self, data: Any) -> int:
        """Write bytes, update the checksum, and return the number of bytes written."""
        data = memoryview(data)
        for start in range(0, len(data), _IO_BYTES):
            piece = data[start : start + _IO_BYTES]
            self.crc = zlib.crc32(piece, self.crc)
            super().write(piece)
        return len(data)


@contextlib.contextmanager
def open_writer(target: Path) -> Iterator[Any]:
    """Open a writer for a new file. After the `with` block, the checksum is filled in and the file replaces `target`.

    Raises: OSError: the file can't be written. An existing `target` is left unchanged.
    """
    with replacing(target) as temporary:
        with SealedWriter(temporary.open("wb", buffering=0)) as writer:
            yield writer
        with temporary.open("r+b") as file:
            file.seek(_checksum_offset(_read_header(file)))
            file.write(_hex_digits(writer.crc))


def has_valid_checksum(path: Path) -> bool:
    """Return whether a file can be read and its checksum is valid."""
    with contextlib.suppress(OSError, ValueError), path.open("rb") as file:
        header = _read_header(file)
        start = _checksum_offset(header)
        end = start + len(UNKNOWN)
        header_with_placeholder = header[:start] + UNKNOWN.encode() + header[end:]
        crc = zlib.crc32(header_with_placeholder)
        while piece := file.read(_IO_BYTES):
            crc = zlib.crc32(piece, crc)
        return header[start:end] == _hex_digits(crc)
    return False


def _read_header(file: BinaryIO) -> bytes:
    """Read the header. Its first 8 bytes are the length of the rest.

    If that length exceeds the file size, the file is damaged or of another kind. In that case, return only the 8 bytes.
    """
    length_bytes = file.read(8)
    length = int.from_bytes(length_bytes, "little")
    if length >= os.fstat(file.fileno()).st_size:
        return length_bytes
    return length_bytes + file.read(length)


def _checksum_offset(header: bytes) -> int:
    """Return the offset of the checksum's first digit. Raises: ValueError: there is no checksum."""
    checksum = _CHECKSUM_FIELD.search(header)
    if checksum is None:
        raise ValueError("no checksum")
    return checksum.start("digits")


def _hex_digits(crc: int) -> bytes:
    """Format a checksum as eight hexadecimal digits."""
    return f"{crc:08x}".encode()
