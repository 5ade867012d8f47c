"""What a measurement's figures depend on besides the code measured: versions, commit, machine."""

import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .._version import __version__


def setting() -> dict[str, Any]:
    """Versions, commit and machine, as results note them."""
    import mlx.core as mx

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


def title(what: str, result: dict[str, Any]) -> str:
    """A picture's title: what it shows, of which model and on which machine."""
    machine = result["machine"]
    device = "GPU" if "gpu" in machine["device"] else "CPU"
    return f"{what}\nModel: {result['model']}\n{machine['processor']}, {machine['cores']} cores, {device}"


def _commit() -> str:
    """The checkout's commit, with "+" if it has changes; "unknown" outside a checkout."""
    describe = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    here: Any = {"cwd": Path(__file__).parent, "stderr": subprocess.DEVNULL, "text": True}
    try:
        return subprocess.check_output(describe, **here).strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _processor() -> str:
    import mlx.core as mx

    if mx.metal.is_available() or mx.default_device().type == mx.gpu:
        return str(mx.device_info()["device_name"])
    info = Path("/proc/cpuinfo")
    named = re.search(r"^model name\s*:(.*)$", info.read_text() if info.is_file() else "", re.M)
    return named[1].strip() if named else platform.processor() or "unknown"
