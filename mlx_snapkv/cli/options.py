"""Option values that several commands read alike."""

from __future__ import annotations

from pathlib import Path

from ..errors import SnapKVError
from ..reporting import plots


def whole_numbers(option: str, text: str, least: int) -> list[int]:
    """Whole numbers from a comma-separated list; empty for an empty one."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = [0]
    if any(n < least for n in numbers):
        raise SnapKVError(f"{option} must be whole numbers from {least}, with commas, got {text!r}")
    return numbers


def writable(output: str, suffix: str) -> Path:
    """The path that all files' names start with; its folder is made if need be, before anything is measured."""
    plots.require_matplotlib()
    try:
        base = Path(output).expanduser()
        base.parent.mkdir(parents=True, exist_ok=True)
        with_suffix(base, suffix).touch()
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise SnapKVError(f"--output {output}: {reason}") from error
    return base


def with_suffix(base: Path, suffix: str) -> Path:
    """`base` and a suffix, whatever dots its name has."""
    return base.with_name(base.name + suffix)
