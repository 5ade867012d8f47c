"""Finds the prompt length at which sparse attention becomes faster than the full cache on this machine."""

from __future__ import annotations

from typing import NamedTuple

from .speed_record import DECODE_FULL, DECODE_SPARSE, READ_FULL, READ_SPARSE, Speed

LENGTHS = tuple(1 << n for n in range(10, 21))  # tokens, from 1k to 1M
MEASURED, ESTIMATED, UNKNOWN = "measured", "estimated", "unknown"


class BreakEven(NamedTuple):
    """The shortest of `LENGTHS` at which sparse attention is faster.

    Attributes:
        basis: MEASURED if the length comes from timed requests, ESTIMATED if it comes from timing a layer, or UNKNOWN.
        tokens: the length in tokens. None if it is unknown, or if sparse attention isn't faster at any of `LENGTHS`.
    """

    basis: str = UNKNOWN
    tokens: int | None = None

    def __str__(self) -> str:
        """Return a phrase to follow "sparse decoding", e.g. "pays from 8,192 tokens on (measured)"."""
        if self.basis == UNKNOWN:
            return "is not measured yet"
        if self.tokens is None:
            return f"pays at no length up to {LENGTHS[-1]:,} ({self.basis})"
        return f"pays from {self.tokens:,} tokens on ({self.basis})"


def break_evens(speed: Speed, estimate: Speed) -> dict[str, BreakEven]:
    """Return the break-even lengths of sparse prefill ("reading") and sparse decoding ("decoding").

    Args:
        speed: the speed record.
        estimate: speeds estimated by timing a layer, used where the record is incomplete.
    """
    return {
        "reading": _break_even(READ_SPARSE, READ_FULL, speed, estimate),
        "decoding": _break_even(DECODE_SPARSE, DECODE_FULL, speed, estimate),
    }


def _break_even(sparse_kind: str, full_kind: str, speed: Speed, estimate: Speed) -> BreakEven:
    """Return the shortest of `LENGTHS` at which `sparse_kind` takes less time than `full_kind`.

    Use the speed record if it has both kinds, or else the estimate if that has both.
    """
    for basis, source_speed in ((MEASURED, speed), (ESTIMATED, estimate)):
        if {sparse_kind, full_kind} <= source_speed.lines.keys():
            faster_lengths = (
                length
                for length in LENGTHS
                if source_speed.is_sparse_faster(sparse_kind, full_kind, length)
            )
            return BreakEven(basis, next(faster_lengths, None))
    return BreakEven(UNKNOWN)


def sentence(lengths: dict[str, BreakEven]) -> str:
    """Describe the result of `break_evens` as a sentence without a full stop."""
    if all(length.basis == UNKNOWN for length in lengths.values()):
        return "no request has measured yet whether sparse attention pays"
    return "; ".join(f"sparse {stage} {length}" for stage, length in lengths.items())
