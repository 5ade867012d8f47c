"""Option values that several commands read alike."""

import json
from pathlib import Path
from typing import Any

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


def write_json(base: Path, result: Any) -> Path:
    """Write a result to `base`.json; that path."""
    path = with_suffix(base, ".json")
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return path


def write_result(base: Path, result: Any, page: str) -> list[Path]:
    """Write a result to `base`.json and its page to `base`.md; their paths."""
    path = with_suffix(base, ".md")
    path.write_text(page, encoding="utf-8")
    return [write_json(base, result), path]


def with_suffix(base: Path, suffix: str) -> Path:
    """`base` and a suffix, whatever dots its name has."""
    return base.with_name(base.name + suffix)
