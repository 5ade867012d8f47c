"""What a bug report needs to say of a machine: its memory, its versions, and what MLX computes with."""

from __future__ import annotations

import platform
import resource
import shutil
import tempfile
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import attention_layers, head_sizes
from ..errors import SnapKVError
from ..planning.machine import this_machine
from ..planning.scores import is_fused
from ..planning.shapes import METAL
from ..planning.units import format_bytes
from .environment import setting
from .tables import Table


def diagnosis(model: Any = None, name: str | None = None) -> dict[str, str]:
    """By what it is called, everything that a bug report needs; of a model, whether its attention has fused kernels."""
    about, machine, folder = setting(), this_machine(), tempfile.gettempdir()
    hardware, versions = about["machine"], about["versions"]
    release = platform.mac_ver()[0]
    system = f"macOS {release}, {platform.machine()}" if release else hardware["system"]
    report = {
        "machine": f"{hardware['processor']}, {hardware['cores']} cores, {system}",
        "memory": f"{format_bytes(machine.memory)}, {format_bytes(machine.usable)} of it for models",
        "wired limit": format_bytes(machine.usable) if METAL else "none, without Metal",
        "MLX computes with": backend(hardware["blas"]),
        "mlx-snapkv": f"{versions['mlx-snapkv']}, commit {about['commit']}",
        "mlx": versions["mlx"],
        "mlx-lm": versions["mlx-lm"],
        "Python": versions["python"],
        "free disk": f"{format_bytes(shutil.disk_usage(folder).free)} in {folder}, for entries in files",
        "open files": open_files(),
    }
    if model is not None:
        report[f"attention of {name}"] = kernels(model)
    return report


def open_files() -> str:
    """How many a process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return "without limit"
    most = "without limit" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    return f"{soft:,} at once, {most} if asked for"


def backend(blas: str) -> str:
    """Metal, CUDA or the CPU."""
    if METAL:
        return "Metal"
    if mx.cuda.is_available():
        return "CUDA"
    return f"the CPU, BLAS: {blas}"


def kernels(model: Any) -> str:
    """Whether MLX's fused attention takes chunks of a prompt with a model's heads, or makes all their scores."""
    try:
        layers = attention_layers(model, make_prompt_cache(model))
        sizes = sorted(set(head_sizes(model, layers)))
    except SnapKVError as error:
        return str(error)
    heads = f"heads of {' and '.join(map(str, sizes))}"
    unfused = [str(size) for size in sizes if not is_fused(size)]
    if not unfused:
        return f"{heads}, fused for a prompt's chunks"
    return f"{heads}, not fused for a prompt's chunks with {' and '.join(unfused)}"


def as_table(report: dict[str, str]) -> Table:
    table = Table("For a bug report", "", ["name", "here"])
    for row in report.items():
        table.add(*row)
    return table
