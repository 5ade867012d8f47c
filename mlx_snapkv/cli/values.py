"""Values that are typed as texts: lists of numbers, bytes and tokens with their units."""

from __future__ import annotations

from ..errors import SnapKVError

MOST = 10_000_000  # tokens of a prompt
UNITS = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def whole_numbers(option: str, text: str, least: int) -> list[int]:
    """Whole numbers from a comma-separated list; empty for an empty one."""
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = [0]
    if any(not least <= n <= MOST for n in numbers):
        raise SnapKVError(
            f"{option} must be whole numbers from {least} to {MOST}, with commas, got {text!r}"
        )
    return numbers


def n_bytes(option: str, text: str, least: int = 1) -> int:
    """At least so many bytes, from a number and, if there is one, a decimal unit: "500MB", "4 GB", "1.5e9"."""
    number, unit = text.strip().lower().removesuffix("b"), 1.0
    if number[-1:] in UNITS:
        number, unit = number[:-1], UNITS[number[-1]]
    try:
        found = float(number) * unit
    except ValueError:
        found = 0.0
    if not least <= found < 2**63:
        bounds = f" from {least:,}" if least > 1 else ""
        raise SnapKVError(
            f"{option} must be a number of bytes{bounds}, such as 500MB or 4GB, got {text!r}"
        )
    return int(found)


def n_tokens(option: str, text: str) -> int:
    """Tokens from a number and, if there is one, a unit of 1,024s: "4096", "128k", "1M"."""
    number, unit = text.strip().lower(), 1
    if number[-1:] in ("k", "m"):
        number, unit = number[:-1], 1 << (10 if number[-1] == "k" else 20)
    try:
        found = int(float(number) * unit)
    except (ValueError, OverflowError):
        found = 0
    if not 1 <= found <= MOST:
        raise SnapKVError(
            f"{option} must be a number of tokens from 1 to {MOST}, such as 4096, 128k or 1M, got {text!r}"
        )
    return found


def tokens_text(n: int) -> str:
    """A number of tokens as it may be typed: 131,072 is "128k"."""
    for unit, size in (("M", 1 << 20), ("k", 1 << 10)):
        if n >= size and n % size == 0:
            return f"{n // size}{unit}"
    return str(n)
