"""Describe this machine and the installed versions, for results and bug reports."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from .._version import __version__
from ..caches.layers import attention_layers, head_sizes
from ..errors import SnapKVError
from ..planning.machine import processor, this_machine
from ..planning.scores import is_fused
from ..planning.shapes import METAL
from ..planning.units import format_bytes
from ..sparse.kernels.self_test import why_unused
from .tables import Table


def versions_and_machine() -> dict[str, Any]:
    """Return versions, commit and machine, as stored with results."""
    return {
        "versions": {
            "mlx-snapkv": __version__,
            "mlx": version("mlx"),
            "mlx-lm": version("mlx-lm"),
            "python": platform.python_version(),
        },
        "commit": _commit(),
        "machine": {
            "device": str(mx.default_device()),
            "processor": processor(),
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
            "blas": "OpenBLAS" if "openblas" in os.environ.get("LD_PRELOAD", "") else "MLX's own",
        },
    }


def _commit() -> str:
    """Return the checkout's commit, with "+" if there are local changes, or "unknown" outside a checkout."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    folder = Path(__file__).parent
    try:
        return subprocess.check_output(
            command, cwd=folder, stderr=subprocess.DEVNULL, text=True
        ).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def diagnosis(model: Any = None, name: str | None = None) -> dict[str, str]:
    """Collect what a bug report needs, as names and values.

    Args:
        model: a model; if given, the result says whether MLX has fused attention kernels for it.
        name: the model's name.
    """
    about = versions_and_machine()
    hardware = about["machine"]
    versions = about["versions"]
    machine = this_machine()
    folder = tempfile.gettempdir()
    release = platform.mac_ver()[0]
    system = f"macOS {release}, {platform.machine()}" if release else hardware["system"]
    report = {
        "machine": f"{hardware['processor']}, {hardware['cores']} cores, {system}",
        "memory": f"{format_bytes(machine.memory)}, {format_bytes(machine.usable)} of it for models",
        "wired limit": format_bytes(machine.usable) if METAL else "none, without Metal",
        "MLX computes with": backend(hardware["blas"]),
        "GPU kernels": sparse_kernels(),
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
    """Describe how many files a process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return "without limit"
    maximum = "without limit" if hard == resource.RLIM_INFINITY else f"{hard:,}"
    return f"{soft:,} at once, {maximum} if asked for"


def backend(blas: str) -> str:
    """Return what MLX computes with: Metal, CUDA, or the CPU and its BLAS library."""
    if METAL:
        return "Metal"
    if mx.cuda.is_available():
        return "CUDA"
    return f"the CPU, BLAS: {blas}"


def sparse_kernels() -> str:
    """Describe whether the sparse attention kernels pass their self-test on this machine, for a common shape."""
    reason = why_unused(head_dim=128, group=4, dtype=mx.float16)
    return "pass their self-test" if reason is None else f"not used: {reason}"


def kernels(model: Any) -> str:
    """Describe whether MLX's fused attention kernel supports a model's head sizes for prompt chunks.

    Without this kernel, the attention scores of a whole chunk are in memory at the same time.
    """
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
    """Return a `diagnosis` as a table."""
    table = Table("For a bug report", "", ["name", "here"])
    for row in report.items():
        table.add(*row)
    return table
