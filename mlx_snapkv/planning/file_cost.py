"""The bytes that reading a prompt will write to files, and whether the disk has room for them."""

import contextlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ..sparse.options import Sparse
from ..sparse.prompt_caches import in_files
from .entry_sizes import EntrySizes
from .settings import Setting
from .units import format_bytes


class Disk(NamedTuple):
    """A disk that entries are written to.

    Attributes:
        folders: the folders on it that entries are written to.
        folder_bytes: bytes that are written to each of them.
        free: bytes that are free on the disk.
    """

    folders: tuple[Path, ...]
    folder_bytes: int
    free: int

    @property
    def need(self) -> int:
        """Return the bytes that are written to the disk."""
        return self.folder_bytes * len(self.folders)


@dataclass(frozen=True)
class FileCost:
    """The bytes that reading a prompt will write to files."""

    tokens: int
    disks: tuple[Disk, ...]

    def __str__(self) -> str:
        """Return the sentence for users, with the free space of every disk."""
        disks = []
        for disk in self.disks:
            size = format_bytes(disk.folder_bytes)
            folders = " and ".join(f"{size} in {folder}" for folder in disk.folders)
            disks.append(f"{folders} ({format_bytes(disk.free)} free)")
        return f"reading {self.tokens:,} tokens will write at most {' and '.join(disks)}"

    @property
    def warnings(self) -> list[str]:
        """Return a sentence for each disk that has too little room."""
        return [
            f"{disk.folders[0]} does not have enough room: {format_bytes(disk.need)} will be written and "
            f"{format_bytes(disk.free)} is free; set --store-dir to another folder, "
            "or give a shorter text"
            for disk in self.disks
            if disk.need > disk.free
        ]


def file_cost(
    model, setting: Setting | None, n_new: int, *, saved_in: Path | None = None
) -> FileCost | None:
    """Return the bytes that reading `n_new` tokens will write.

    Return None if entries don't go to files, or no disk says what is free.

    Args:
        model: an mlx-lm model, its weights loaded or not.
        setting: sparse attention, with the store and its folder; nothing else writes to files.
        n_new: tokens to read.
        saved_in: the folder that all entries are copied to at the end.
    """
    if n_new == 0 or not isinstance(setting, Sparse) or not in_files(setting.store):
        return None
    folder_bytes = EntrySizes(model).of_files(setting.store, n_new)
    folders = [Path(setting.store_dir or tempfile.gettempdir())]
    if saved_in is not None:
        folders.append(saved_in)
    disks: dict[int, Disk] = {}  # number of the device -> disk
    for path in folders:
        with contextlib.suppress(OSError):  # some file systems don't say what is free
            device = path.stat().st_dev
            if device not in disks:
                free = shutil.disk_usage(path).free
                disks[device] = Disk(folders=(), folder_bytes=folder_bytes, free=free)
            disk = disks[device]
            disks[device] = disk._replace(folders=(*disk.folders, path))
    return FileCost(tokens=n_new, disks=tuple(disks.values())) if disks else None
