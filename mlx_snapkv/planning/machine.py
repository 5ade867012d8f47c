"""Determines this machine's processor, its memory, and the part of the memory that models can use."""

import os
import platform
import re
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

# On Macs with at most this many bytes of memory, the GPU may use two thirds of it. On larger Macs, it may use three
# quarters.
_SMALL_MEMORY = 36 << 30
_MEMINFO = Path("/proc/meminfo")  # Linux
_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")  # the memory limit of a container
_CPUINFO = Path("/proc/cpuinfo")  # Linux

_BUFFERS_SHARE = 16  # MLX's buffer cache may take up to 1/16 of the usable memory
# Smallest limit for the buffer cache, in bytes. It is enough for the activations of a chunk.
_MIN_BUFFERS = 256 << 20


class Machine(NamedTuple):
    """A machine's total memory, and the part that models can use, in bytes."""

    memory: int
    usable: int

    @property
    def without_buffers(self) -> int:
        """Return the bytes available for weights and requests: usable memory minus the share for MLX's buffer cache."""
        return self.usable - self.usable // _BUFFERS_SHARE

    @property
    def buffer_limit(self) -> int:
        """Return the size limit for MLX's cache of freed buffers. By default, MLX keeps all of them."""
        return max(_MIN_BUFFERS, self.usable // _BUFFERS_SHARE)


def this_machine() -> Machine:
    """Return this machine's memory.

    With Metal, the usable memory is the GPU's recommended maximum. Without Metal, it is the available memory plus the
    memory that MLX already uses, but at most a container's limit. If the available memory is unknown, all memory counts
    as usable.
    """
    if mx.metal.is_available():
        info = mx.device_info()
        return Machine(
            memory=int(info["memory_size"]),
            usable=int(info["max_recommended_working_set_size"]),
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    container_limit = _text_of(_CONTAINER_LIMIT).strip()
    if container_limit.isdecimal():  # "max" means no limit
        memory = min(memory, int(container_limit))
    # e.g. "MemAvailable:    1234567 kB"
    available_memory = re.search(r"MemAvailable: +(?P<kib>\d+) kB", _text_of(_MEMINFO))
    if available_memory is None:
        return Machine(memory=memory, usable=memory)
    available = int(available_memory["kib"]) * 1024 + mx.get_active_memory()
    return Machine(memory=memory, usable=min(memory, available))


def _text_of(path: Path) -> str:
    """Return a file's text, or "" if there is no such file."""
    return path.read_text() if path.is_file() else ""


def mac(memory: int) -> Machine:
    """Return the `Machine` for a Mac with `memory` bytes and the default GPU share."""
    usable = memory * 2 // 3 if memory <= _SMALL_MEMORY else memory * 3 // 4
    return Machine(memory=memory, usable=usable)


def processor() -> str:
    """Return the GPU's name. If there is no GPU, return the CPU's name, or "unknown"."""
    if mx.metal.is_available() or mx.default_device().type == mx.gpu:
        return str(mx.device_info()["device_name"])
    # e.g. "model name : AMD EPYC 9575F 64-Core Processor"
    cpu_name = re.search(r"^model name\s*:(.*)$", _text_of(_CPUINFO), re.M)
    if cpu_name is not None:
        return cpu_name[1].strip()
    return platform.processor() or "unknown"
