"""How much memory a machine has for models."""

import os
import re
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

_SMALL_MEMORY = (
    36 << 30
)  # bytes: up to here a Mac's GPU may use two thirds, above it three quarters
_MEMINFO = Path("/proc/meminfo")  # Linux's
_LIMIT = Path("/sys/fs/cgroup/memory.max")  # of a container


_BUFFERS = 16  # the part of a GPU's memory that MLX may keep of what was freed
_LEAST_BUFFERS = 256 << 20  # bytes: what a chunk's activations are made in, again and again


class Machine(NamedTuple):
    """A machine's memory in bytes, and how much of it a model may use."""

    memory: int
    usable: int

    @property
    def buffers(self) -> int:
        """Bytes of freed buffers that MLX may keep; by default it keeps all, which other programs then lack."""
        return max(_LEAST_BUFFERS, self.usable // _BUFFERS)


def this_machine() -> Machine:
    """The machine that this runs on: what Metal recommends at most for its GPU; without one, what MLX may use now, the
    memory in use by it included."""
    if mx.metal.is_available():
        info = mx.device_info()
        return Machine(int(info["memory_size"]), int(info["max_recommended_working_set_size"]))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if _LIMIT.exists() and (limit := _LIMIT.read_text().strip()).isdecimal():
        memory = min(memory, int(limit))
    text = _MEMINFO.read_text() if _MEMINFO.exists() else ""
    found = re.search(r"MemAvailable: +(\d+) kB", text)
    free = int(found[1]) * 1024 + mx.get_active_memory() if found else memory
    return Machine(memory, min(memory, free))


def mac(memory: int) -> Machine:
    """A Mac of so many bytes, of which its GPU may by default use a part only."""
    return Machine(memory, memory * 2 // 3 if memory <= _SMALL_MEMORY else memory * 3 // 4)
