"""Finds the length of text from which sparse decoding is faster than the full cache on this machine."""

from __future__ import annotations

from typing import NamedTuple

from .speed_record import DECODE_FULL, DECODE_SPARSE, Speed

LENGTHS = tuple(1 << n for n in range(10, 21))  # tokens, from 1k to 1M
MEASURED, ESTIMATED, UNKNOWN = "measured", "estimated", "unknown"


class BreakEven(NamedTuple):
    """The shortest of `LENGTHS` at which sparse decoding is faster.

    Attributes:
        basis: MEASURED if the length comes from timed requests, ESTIMATED if it comes from timing a layer, or UNKNOWN.
        tokens: the length in tokens. None if it is unknown, or if sparse decoding isn't faster at any of `LENGTHS`.
    """

    basis: str = UNKNOWN
    tokens: int | None = None

    def __str__(self) -> str:
        """Return a sentence without a full stop, e.g. "sparse decoding pays from 8,192 tokens on (measured)"."""
        if self.basis == UNKNOWN:
            return "no request has measured yet whether sparse decoding pays"
        if self.tokens is None:
            return f"sparse decoding pays at no length up to {LENGTHS[-1]:,} ({self.basis})"
        return f"sparse decoding pays from {self.tokens:,} tokens on ({self.basis})"


def break_even(speed: Speed, estimate: Speed) -> BreakEven:
    """Return the shortest of `LENGTHS` at which sparse decoding takes less time than the full cache.

    Args:
        speed: the speed record.
        estimate: speeds estimated by timing a layer, used if the record is incomplete.
    """
    for basis, source_speed in ((MEASURED, speed), (ESTIMATED, estimate)):
        if {DECODE_SPARSE, DECODE_FULL} <= source_speed.lines.keys():
            faster_lengths = filter(source_speed.is_sparse_faster, LENGTHS)
            return BreakEven(basis, next(faster_lengths, None))
    return BreakEven(UNKNOWN)
