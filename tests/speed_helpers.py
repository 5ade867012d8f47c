"""Speeds of fictitious machines, and a speed record for them."""

from mlx_snapkv import Sparse
from mlx_snapkv.planning import speed_record
from mlx_snapkv.planning.speed_record import (
    DECODE_FULL,
    DECODE_SPARSE,
    SETUP,
    Measurement,
    Speed,
)

LENGTHS = (1000, 8000, 64_000)  # tokens; the speeds were measured at these lengths

# For each kind, the seconds `a + b * length` of a machine on which sparse attention always loses, and of one on which
# it decodes faster from about 11,000 tokens on.
LOSES = {
    SETUP: (1.0, 0),
    DECODE_FULL: (0.01, 1e-7),
    DECODE_SPARSE: (0.05, 1e-7),
}
WINS_LATER = LOSES | {
    DECODE_FULL: (0.01, 1e-6),
    DECODE_SPARSE: (0.02, 1e-7),
}


def measured(lines):
    """Return the measurements of a machine with these lines, at `LENGTHS`."""
    return [Measurement(kind, n, a + b * n) for kind, (a, b) in lines.items() for n in LENGTHS]


def speed(lines):
    return Speed().with_measurements(measured(lines))


def remember(model, lines, sparse=Sparse()):  # noqa: B008
    speed_record.record_measurements(model, sparse, measured(lines))
