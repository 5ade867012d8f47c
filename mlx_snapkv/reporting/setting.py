"""What a measurement's figures depend on besides the code measured: versions, commit, machine."""

import os
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .._version import __version__


def setting() -> dict[str, Any]:
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
    here = Path(__file__).parent
    try:
        run = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--exclude=*"],
            cwd=here,
            capture_output=True,
            text=True,
        )
    except OSError:
        return "unknown"
    return run.stdout.strip() if run.returncode == 0 else "unknown"


def _processor() -> str:
    import mlx.core as mx

    if mx.metal.is_available() or mx.default_device().type == mx.gpu:
        return str(mx.device_info()["device_name"])
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
