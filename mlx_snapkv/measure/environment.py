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
from ..planning.units import format_bytes
from ..sparse.kernels.self_test import why_unused
from .tables import Table


def versions_and_machine() -> dict[str, Any]:
    """Return the versions, commit and machine to store with results."""
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
    """Return the checkout's commit, followed by "+" if there are local changes.

    Return "unknown" if the package does not run from a checkout, or if Git is not installed.
    """
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    folder = Path(__file__).parent
    try:
        return subprocess.check_output(
            command, cwd=folder, stderr=subprocess.DEVNULL, text=True
        ).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def diagnosis(model: Any = None, name: str | None = None) -> dict[str, str]:
    """Collect information for a bug report, as a dict of names and values.

    Args:
        model: if given, the result says whether MLX has fused attention kernels for this model.
        name: the model's name.
    """
    setup = versions_and_machine()
    hardware = setup["machine"]
    versions = setup["versions"]
    machine = this_machine()
    has_metal = mx.metal.is_available()
    folder = tempfile.gettempdir()
    macos_release, *_ = platform.mac_ver()  # empty on other systems
    system = hardware["system"]
    if macos_release:
        system = f"macOS {macos_release}, {platform.machine()}"
    report = {
        "machine": f"{hardware['processor']}, {hardware['cores']} cores, {system}",
        "memory": f"{format_bytes(machine.memory)}, {format_bytes(machine.usable)} of it for models",
        "wired limit": format_bytes(machine.usable) if has_metal else "none, without Metal",
        "MLX computes with": backend_name(hardware["blas"]),
        "GPU kernels": sparse_kernels_text(),
        "mlx-snapkv": f"{versions['mlx-snapkv']}, commit {setup['commit']}",
        "mlx": versions["mlx"],
        "mlx-lm": versions["mlx-lm"],
        "Python": versions["python"],
        "free disk": f"{format_bytes(shutil.disk_usage(folder).free)} in {folder}, for entries in files",
        "open files": open_files_text(),
    }
    if model is not None:
        report[f"attention of {name}"] = fused_attention_text(model)
    return report


def open_files_text() -> str:
    """Describe how many files a process may open."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY:
        return "without limit"
    maximum = "without limit" if hard_limit == resource.RLIM_INFINITY else f"{hard_limit:,}"
    return f"{soft_limit:,} at once, {maximum} if asked for"


def backend_name(blas: str) -> str:
    """Return what MLX computes with: Metal, CUDA, or the CPU and its BLAS library."""
    if mx.metal.is_available():
        return "Metal"
    if mx.cuda.is_available():
        return "CUDA"
    return f"the CPU, BLAS: {blas}"


def sparse_kernels_text() -> str:
    """Say whether the sparse attention kernels pass their self-test for a common shape, or why they are not used."""
    reason = why_unused(head_dim=128, group=4, dtype=mx.float16)
    return "pass their self-test" if reason is None else f"not used: {reason}"


def fused_attention_text(model: Any) -> str:
    """Say whether MLX's fused attention kernel supports a model's head sizes for prompt chunks.

    Without the fused kernel, all of a chunk's attention scores are in memory at the same time. If the model can't be
    compressed, return the reason.
    """
    try:
        layers = attention_layers(model, make_prompt_cache(model))
        sizes = sorted(head_sizes(model, layers))
    except SnapKVError as error:
        return str(error)
    heads = f"heads of {' and '.join(map(str, sizes))}"
    unfused_sizes = [str(size) for size in sizes if not is_fused(size)]
    if not unfused_sizes:
        return f"{heads}, fused for a prompt's chunks"
    return f"{heads}, not fused for a prompt's chunks with {' and '.join(unfused_sizes)}"


def as_table(report: dict[str, str]) -> Table:
    """Return a `diagnosis` as a table."""
    table = Table("For a bug report", "", ["name", "here"])
    for row in report.items():
        table.add(*row)
    return table
