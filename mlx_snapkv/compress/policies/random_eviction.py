"""Random eviction: the baseline that every other policy has to beat."""

from dataclasses import dataclass

import mlx.core as mx

from ...entries.entries import Entries
from ...hyperparameters import count
from ..policy import Policy


@dataclass(frozen=True, kw_only=True)
class RandomEviction(Policy):
    """Keeps the recent window and, for each KV head, a uniformly random set of earlier entries.

    An entry's score is a hash of its position, its KV head and `seed`, so it never changes. Whether `schedule` is
    "once" or "block", the kept entries before the window are therefore a uniform sample of all entries before it.

    Attributes:
        seed: seed of the hash.
    """

    name = "random"
    summary = "random entries, as a control"
    paper = ""

    seed: int = count(0)

    def score(self, entries: Entries) -> mx.array:
        """Return each entry's hash, `(B, n_kv_heads, T)` float32.

        Hashes are below 2**24, so they are exact in float32.
        """
        n_kv_heads = entries.keys.shape[1]
        head_numbers = mx.arange(n_kv_heads, dtype=mx.uint32)[:, None]
        hashes = (entries.positions + 1) * 0x9E3779B1 + head_numbers * 0x85EBCA77
        hashes += mx.array(self.seed, mx.uint32)
        # Chris Wellons' lowbias32 hash: every input bit affects every output bit.
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1)):
            hashes = (hashes ^ (hashes >> shift)) * mx.array(factor, mx.uint32)
        return (hashes >> 8).astype(mx.float32)
