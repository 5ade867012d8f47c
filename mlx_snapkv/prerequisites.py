"""Check the package's requirements without importing MLX.

`python mlx_snapkv/prerequisites.py` runs only these checks.

This file must run on Python 3.9, the version of macOS's `/usr/bin/python3`.
"""

from __future__ import annotations

import platform
import sys
from typing import Sequence  # noqa: UP035

PYTHON = (3, 10)
MACOS = (14, 0)


def complaint(
    system: str,
    machine: str,
    version: Sequence[int],
    macos: str = "",
    *,
    mlx_error: str | None = None,
    has_metal: bool = True,
) -> str | None:
    """Explain in one sentence why the package can't run on a machine, and what to do. Return None if it can.

    Args:
        system: the value of `platform.system()`.
        machine: the value of `platform.machine()`.
        version: the Python version.
        macos: the macOS version, or "" on other systems.
        mlx_error: the error raised by importing MLX. None if the import succeeded or was not tried.
        has_metal: whether MLX found a GPU. Only checked on a Mac.
    """
    if tuple(version[:2]) < PYTHON:
        needed = ".".join(str(part) for part in PYTHON)
        running = ".".join(str(part) for part in version[:3])
        return (
            f"Python {needed} or later is needed, and this is {running}: install one, for example from python.org or "
            "with brew install python, and name it, as in make demo PYTHON=python3.12"
        )
    if system == "Darwin":
        if machine == "x86_64":
            return (
                "MLX runs on Macs with Apple silicon only, and this Python is for Intel: on a Mac with an M chip "
                "install a native (arm64) Python; an Intel Mac can't run it"
            )
        release = tuple(int(part) for part in macos.split(".")[:2] if part.isdigit())
        if release and release < MACOS:
            return f"MLX needs macOS {MACOS[0]} or later, and this is {macos}: update macOS"
    if mlx_error is not None:
        package = "mlx" if system == "Darwin" else "mlx[cpu]"
        return f"MLX can't be imported ({mlx_error}): install it again, with pip install --force-reinstall {package}"
    if system == "Darwin" and not has_metal:
        return (
            "MLX finds no GPU with Metal on this Mac: run it outside of virtual machines, with the MLX that "
            "pip install mlx gives"
        )
    return None


def complaint_here(**mlx_findings: object) -> str | None:
    """Return the `complaint` about this machine, or None.

    Args:
        **mlx_findings: the `mlx_error` and `has_metal` arguments of `complaint`.
    """
    return complaint(
        system=platform.system(),
        machine=platform.machine(),
        version=sys.version_info,  # type: ignore[arg-type]
        macos=platform.mac_ver()[0],
        **mlx_findings,  # type: ignore[arg-type]
    )


def require_prerequisites() -> None:
    """Exit with code 2 and an error message if the package can't run on this machine."""
    sentence = complaint_here()
    if sentence is not None:
        print("mlx-snapkv: " + sentence, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    require_prerequisites()
