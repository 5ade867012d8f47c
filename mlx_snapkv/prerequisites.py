"""What MLX needs of a machine, before anything of it is imported; also `python mlx_snapkv/prerequisites.py`.

Python 3.9, which is on a Mac, must be able to read this.
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
    """One sentence on why this can't run here, and what to do; None if it can.

    Args:
        system, machine: as `platform` has them.
        version: Python's.
        macos: a Mac's version.
        mlx_error: what went wrong as MLX was imported.
        has_metal: whether MLX found a GPU, on a Mac.
    """
    if tuple(version[:2]) < PYTHON:
        needed, found = (".".join(map(str, v[:3])) for v in (PYTHON, version))
        return (
            f"Python {needed} or later is needed, and this is {found}: install one, for example from python.org or "
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
        return (
            f"MLX can't be imported ({mlx_error}): install it again, with pip install --force-reinstall mlx"
            f"{'' if system == 'Darwin' else '[cpu]'}"
        )
    if system == "Darwin" and not has_metal:
        return (
            "MLX finds no GPU with Metal on this Mac: run it outside of virtual machines, with the MLX that "
            "pip install mlx gives"
        )
    return None


def complaint_here(**found: object) -> str | None:
    """The same of this machine and Python."""
    here = platform.system(), platform.machine(), sys.version_info, platform.mac_ver()[0]
    return complaint(*here, **found)  # type: ignore[arg-type]


def require() -> None:
    """Exit with the sentence, if there is one."""
    said = complaint_here()
    if said is not None:
        print("mlx-snapkv: " + said, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    require()
