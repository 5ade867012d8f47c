"""Predicts how many bytes are written to files when a prompt is read, and checks whether the disks have room."""

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
        folders: command-line flag -> folder on this disk. Entries are written to each folder.
        folder_bytes: number of bytes written to each folder.
        free: number of free bytes on the disk.
    """

    folders: dict[str, Path]
    folder_bytes: int
    free: int

    @property
    def needed(self) -> int:
        """Return the total number of bytes written to the disk."""
        return self.folder_bytes * len(self.folders)


@dataclass(frozen=True)
class FileCost:
    """The disk space that reading a prompt takes."""

    tokens: int
    disks: tuple[Disk, ...]

    def __str__(self) -> str:
        """Describe the required and the free disk space in one sentence for users."""
        disk_texts = []
        for disk in self.disks:
            size = format_bytes(disk.folder_bytes)
            folders = " and ".join(f"{size} in {folder}" for folder in disk.folders.values())
            disk_texts.append(f"{folders} ({format_bytes(disk.free)} free)")
        return f"reading {self.tokens:,} tokens will write at most {' and '.join(disk_texts)}"

    @property
    def warnings(self) -> list[str]:
        """Return a warning for each disk with too little space."""
        return [
            f"there is not enough room in {' and '.join(dict.fromkeys(map(str, disk.folders.values())))}: "
            f"{format_bytes(disk.needed)} will be written and {format_bytes(disk.free)} is free; "
            f"choose another disk with {' or '.join(disk.folders)}, or give a shorter text"
            for disk in self.disks
            if disk.needed > disk.free
        ]


def file_cost(
    model, setting: Setting | None, n_new: int, *, saved_in: Path | None = None
) -> FileCost | None:
    """Predict the disk space that reading `n_new` tokens takes.

    Disks whose free space can't be determined are omitted. Return None if no disk remains, or if no entries are written
    to files.

    Args:
        model: an mlx-lm model. Its weights need not be loaded.
        setting: the setting. Only sparse attention with store="file" writes files.
        n_new: number of tokens to read.
        saved_in: the folder that all entries are copied to at the end, or None.
    """
    if n_new == 0 or not isinstance(setting, Sparse) or not in_files(setting.store):
        return None
    folder_bytes = EntrySizes(model).file_bytes(setting.store, n_new)
    folders = {"--store-dir": Path(setting.store_dir or tempfile.gettempdir())}
    if saved_in is not None:
        folders["--output"] = saved_in
    disks: dict[int, Disk] = {}  # device number -> disk
    for flag, folder in folders.items():
        with contextlib.suppress(OSError):  # some file systems do not report free space
            device = folder.stat().st_dev
            if device not in disks:
                free = shutil.disk_usage(folder).free
                disks[device] = Disk(folders={}, folder_bytes=folder_bytes, free=free)
            disks[device].folders[flag] = folder
    return FileCost(tokens=n_new, disks=tuple(disks.values())) if disks else None
