"""This machine: what results note of it, and what a bug report needs."""

from __future__ import annotations

import os
import platform
import re
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
from ..planning.machine import this_machine
from ..planning.scores import is_fused
from ..planning.shapes import METAL
from ..planning.units import format_bytes
from .tables import Table


def setting() -> dict[str, Any]:
    """Versions, commit and machine, as results note them."""
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
            "processor": _processor(),
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
            "blas": "OpenBLAS" if "openblas" in os.environ.get("LD_PRELOAD", "") else "MLX's own",
        },
    }


def _commit() -> str:
    """The checkout's commit, with "+" if it has changes; "unknown" outside a checkout."""
    describe = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    here: Any = {"cwd": Path(__file__).parent, "stderr": subprocess.DEVNULL, "text": True}
    try:
        return subprocess.check_output(describe, **here).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    if mx.metal.is_available() or mx.default_device().type == mx.gpu:
        return str(mx.device_info()["device_name"])
    info = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:(.*)$", info.read_text() if info.is_file() else "", re.M)
    return named[1].strip() if named else platform.processor() or "unknown"


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
