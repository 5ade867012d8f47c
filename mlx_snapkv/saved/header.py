"""The head of a safetensors file, checked against the file's size before anything reads the rest."""

import json
import math
from pathlib import Path
from typing import Any

from ..errors import SnapKVError

BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


def read(path: Path) -> dict[str, str]:
    """Check the head of a file that mlx-lm's `save_prompt_cache` wrote; the metadata that it was given.

    Raises:
        SnapKVError: the file can't be read, is cut short, or is something else.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= size - 8 else b""
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SnapKVError(f"{path} can't be read: {reason}") from error
    try:
        entries = json.loads(text)
        metadata = entries.pop("__metadata__")
        end = _end_of_arrays(entries)
        given = {k.removeprefix("0."): v for k, v in metadata.items() if k.startswith("0.")}
        known = "1.0" in metadata and all(isinstance(v, str) for v in metadata.values())
    except Exception as error:  # whatever stands there
        raise SnapKVError(f"{path} is not a saved prompt cache, or it is damaged") from error
    if not known:
        raise SnapKVError(f"{path} is not a saved prompt cache: it names no caches")
    if size != 8 + length + end:
        raise SnapKVError(
            f"{path} is damaged: it should have {8 + length + end:,} bytes and has {size:,}"
        )
    return given


def _end_of_arrays(entries: dict[str, Any]) -> int:
    """Where the arrays end that follow the header.

    Raises:
        ValueError: they overlap, leave gaps, or are not of the size that they should have.
    """
    end = 0
    for entry in sorted(entries.values(), key=lambda e: e["data_offsets"]):
        start, stop = entry["data_offsets"]
        if start != end or stop - start != math.prod(entry["shape"]) * BYTES[entry["dtype"]]:
            raise ValueError("array sizes disagree")
        end = stop
    return end
