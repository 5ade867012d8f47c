"""What reading a book will take, told before it is read."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..caches.memories import in_files, memory_quantization
from ..policies import Policy, Stages
from .decision import PREFILL_STEP_SIZE, decide, gate
from .footprint import EntrySizes, Footprint, total_bytes
from .report import format_bytes

FEW = 128  # gathered entries, below which a value hardly fits with what stands around it: docs/recall.md


@dataclass(frozen=True)
class Disk:
    """A folder that entries are written to.

    Attributes:
        need, free: bytes.
    """

    folder: Path
    need: int
    free: int

    @property
    def is_short(self) -> bool:
        return self.need > self.free


@dataclass(frozen=True)
class BookCost:
    """What a turn of a book will take.

    Attributes:
        tokens: to read.
        resident: entries per KV head in memory, at most of any layer; `resident_bytes` of all layers.
        stored_bytes: of all these tokens' entries, as they are stored.
        in_memory: whether those stay in memory.
        disks: where they are written.
        gathered: entries per KV head that the answer is decoded from, the fewest of any layer; None if nothing is
            asked yet.
    """

    tokens: int
    resident: int
    resident_bytes: int
    stored_bytes: int
    in_memory: bool
    disks: tuple[Disk, ...]
    gathered: int | None

    def __str__(self) -> str:
        held = f"at most {self.resident:,} entries resident ({format_bytes(self.resident_bytes)})"
        places = [f"all in memory ({format_bytes(self.stored_bytes)})"] if self.in_memory else []
        places += [
            f"{format_bytes(disk.need)} on disk in {disk.folder} ({format_bytes(disk.free)} free)"
            for disk in self.disks
        ]
        return f"{self.tokens:,} tokens to read: {', '.join([held, *places])}"

    @property
    def warnings(self) -> list[str]:
        """What is likely to go wrong, a sentence each."""
        found = [
            f"{disk.folder} has not enough room: {format_bytes(disk.need)} are to be written and "
            f"{format_bytes(disk.free)} are free; give --store-dir another folder, fewer bits (recall:file:4bit), or a "
            "shorter text"
            for disk in self.disks
            if disk.is_short
        ]
        if self.gathered is not None and self.gathered < FEW:
            found.append(
                f"{self.gathered} entries are gathered for the answer: of fewer than about {FEW} a value hardly fits "
                "with what stands around it, so give the policy that votes a larger budget"
            )
        return found


def book_cost(
    model,
    policy: Policy | Stages | None,
    memory: str,
    n_new: int,
    *,
    n_before: int = 0,
    asks: bool = True,
    saved_in: Path | None = None,
) -> BookCost | None:
    """What reading `n_new` tokens of a book will take; None if it is no book.

    Args:
        n_before: tokens that were read and stored before.
        asks: whether an answer follows.
        saved_in: the folder that all entries are copied to in the end.
    """
    n_prompt = n_before + n_new
    if policy is None or memory == "drop" or not policy.reads_in_blocks or n_new == 0:
        return None
    if not n_before and gate(policy, n_prompt, None) is not None:
        return None
    sizes = EntrySizes(model)
    layers = sizes.layers
    rows = Footprint(model, policy, None, PREFILL_STEP_SIZE, sizes).rows_read(n_prompt)
    resident = [min(n_prompt, n) for n in rows]
    stored = n_new * sum(sizes.of_token(memory_quantization(model, layers, memory)))
    _, asking = policy.stages
    folders = [Path(tempfile.gettempdir())] if in_files(memory) else []
    folders += [] if saved_in is None else [saved_in]
    return BookCost(
        tokens=n_new,
        resident=max(resident),
        resident_bytes=total_bytes(sizes.of_token(), resident),
        stored_bytes=stored,
        in_memory=not in_files(memory),
        disks=_disks(folders, stored),
        gathered=min(
            q.entries for q in asking.quotas(decide(policy, n_prompt).at, layers[0].n_layers)
        )
        if asks
        else None,
    )


def _disks(folders: Sequence[Path], need: int) -> tuple[Disk, ...]:
    """The disks that the folders are on, each once, with what is written to all its folders.

    Those that don't tell what is free are left out.
    """
    found: dict[int, Disk] = {}
    for folder in folders:
        with contextlib.suppress(OSError):
            device = folder.stat().st_dev
            before = found.get(device) or Disk(folder, 0, shutil.disk_usage(folder).free)
            found[device] = replace(before, need=before.need + need)
    return tuple(found.values())
