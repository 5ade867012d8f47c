"""The bytes that reading a prompt will write to files, and whether the disk has room for them."""

import contextlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..sparse.prompt_caches import in_files
from .entry_sizes import EntrySizes
from .units import format_bytes


class Disk(NamedTuple):
    """A disk that entries are written to: `each` bytes into each of its `folders`; `free` bytes are free."""

    folders: tuple[Path, ...]
    each: int
    free: int

    @property
    def need(self) -> int:
        return self.each * len(self.folders)


@dataclass(frozen=True)
class FileCost:
    """The bytes that reading a prompt will write to files."""

    tokens: int
    disks: tuple[Disk, ...]

    def __str__(self) -> str:
        where = " and ".join(
            " and ".join(f"{format_bytes(disk.each)} in {folder}" for folder in disk.folders)
            + f" ({format_bytes(disk.free)} free)"
            for disk in self.disks
        )
        return f"reading {self.tokens:,} tokens will write at most {where}"

    @property
    def warnings(self) -> list[str]:
        return [
            f"{disk.folders[0]} does not have enough room: {format_bytes(disk.need)} will be written and "
            f"{format_bytes(disk.free)} is free; set --store-dir to another folder, "
            "or give a shorter text"
            for disk in self.disks
            if disk.need > disk.free
        ]


def file_cost(
    model,
    store: str | None,
    n_new: int,
    *,
    folder: str | None = None,
    saved_in: Path | None = None,
) -> FileCost | None:
    """Return the bytes that reading `n_new` tokens will write; None if entries don't go to files.

    Args:
        folder: the folder for temporary files; None is TMPDIR.
        saved_in: the folder that all entries are copied to at the end.
    """
    if n_new == 0 or not in_files(store):
        return None
    stored = EntrySizes(model).of_files(store, n_new)
    disks: dict[int, Disk] = {}
    for place in filter(None, (Path(folder or tempfile.gettempdir()), saved_in)):
        with contextlib.suppress(OSError):  # some file systems don't say what is free
            device = place.stat().st_dev
            before = disks.get(device) or Disk((), stored, shutil.disk_usage(place).free)
            disks[device] = before._replace(folders=(*before.folders, place))
    return FileCost(n_new, tuple(disks.values())) if disks else None
