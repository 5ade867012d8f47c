"""Finds the prompt length at which sparse attention becomes faster than the full cache on this machine."""

from __future__ import annotations

from typing import NamedTuple

from .speed_record import DECODE_ALL, DECODE_FEW, READ_ALL, READ_FEW, Speed

LENGTHS = tuple(1 << n for n in range(10, 21))  # tokens, from 1k to 1M
MEASURED, ESTIMATED, UNKNOWN = "measured", "estimated", "unknown"


class BreakEven(NamedTuple):
    """The shortest of `LENGTHS` at which sparse attention is faster.

    Attributes:
        basis: where the length comes from: MEASURED in requests, ESTIMATED by timing a layer, or UNKNOWN.
        tokens: the length in tokens. None if it is unknown, or if sparse attention is never faster.
    """

    basis: str = UNKNOWN
    tokens: int | None = None

    def __str__(self) -> str:
        """Return words to follow "sparse attention", such as "pays from 8,192 tokens on (measured)"."""
        if self.basis == UNKNOWN:
            return "is not measured yet"
        where = f"at no length up to {LENGTHS[-1]:,}" if self.tokens is None else ""
        return f"pays {where or f'from {self.tokens:,} tokens on'} ({self.basis})"


def break_evens(speed: Speed, estimate: Speed) -> dict[str, BreakEven]:
    """Return the break-even lengths of sparse prefill ("reading") and sparse decoding ("decoding").

    Args:
        speed: the speed record.
        estimate: speeds estimated by timing a layer, used where the record has no measurements.
    """
    ways = {"reading": (READ_FEW, READ_ALL), "decoding": (DECODE_FEW, DECODE_ALL)}
    bases = {MEASURED: speed, ESTIMATED: estimate}
    found = {}
    for name, (few, every) in ways.items():
        known = ((basis, x) for basis, x in bases.items() if {few, every} <= x.lines.keys())
        basis, by = next(known, (UNKNOWN, speed))
        found[name] = BreakEven(basis, by.pays_from(few, every, LENGTHS))
    return found


def sentence(found: dict[str, BreakEven]) -> str:
    """Describe the result of `break_evens` in a sentence without a full stop."""
    if all(way.basis == UNKNOWN for way in found.values()):
        return "no request has measured yet whether sparse attention pays"
    return "; ".join(f"sparse {name} {way}" for name, way in found.items())
