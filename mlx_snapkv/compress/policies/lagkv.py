"""LagKV: keep the entries that differ most from the block of entries after theirs."""

from dataclasses import dataclass

import mlx.core as mx

from ...entries.attention import BLOCK_BYTES
from ...entries.entries import Entries
from ...entries.spans import spans
from ..policy import Policy

LAG = 128  # entries per block


@dataclass(frozen=True, kw_only=True)
class LagKV(Policy):
    """Compare the entries after the sink with the next block of 128 entries.

    Keys and values are scaled to the minimum and maximum of the next block, coordinate by coordinate. The standard
    deviation of an entry's scaled coordinates, after a softmax over its own block, gives it a rank in that block, which
    is its score: all blocks keep equally many. The last full block has no successor: it and the entries after it stay
    as far as the budget goes, the newest first. The same applies to all entries if fewer than 256 follow the
    sink.

    Attributes:
        n_sink: number of first entries, which are always kept and are not part of the blocks.

    It differs from the paper: every eviction divides the entries held into blocks again.
    """

    name = "lagkv"
    summary = "entries that differ most from the block after theirs"
    paper = "Liang et al. 2025, arXiv:2504.04704"

    n_sink: int = 4

    def score(self, entries: Entries) -> mx.array:
        """Return `(B, n_kv_heads, T)` float32 scores: below 1 for compared entries, at least 1 for the others."""
        T = len(entries)
        n_blocks = (T - self.n_sink) // LAG
        recency = mx.arange(T) / T
        B, H, _, D = entries.read_keys(0, 1).shape
        if n_blocks < 2:
            return mx.broadcast_to(recency, (B, H, T))
        blocks_at_once = max(1, BLOCK_BYTES // (4 * B * H * LAG * D))
        end = self.n_sink + (n_blocks - 1) * LAG

        def ranks_in_block(start: int, stop: int, after: list[mx.array]) -> mx.array:
            # The last block is compared with the block after it.
            of_keys = _information(entries.read_keys(start, stop + LAG, after))
            of_values = _information(entries.read_values(start, stop + LAG, after))
            order = mx.argsort(of_keys + of_values, axis=-1)
            ranks = mx.argsort(order, axis=-1)  # the inverse of the order
            return ranks.astype(mx.float32).flatten(2) / LAG

        scores = entries.by_block(ranks_in_block, spans(self.n_sink, end, blocks_at_once * LAG))
        newest = mx.broadcast_to(recency[end:] + 1, (B, H, T - end))
        return mx.concatenate([mx.ones((B, H, self.n_sink)), scores, newest], axis=-1)


def _information(states: mx.array) -> mx.array:
    """Return how much each entry differs from the next block, `(B, n_kv_heads, n_blocks - 1, LAG)` float32.

    Coordinates are scaled to the next block, `(x - min) / (max - min)`; the result is a softmax over a block of the
    standard deviation of an entry's scaled coordinates.

    Args:
        states: keys or values `(B, n_kv_heads, n_blocks * LAG, head_dim)`; the last block is only compared with.
    """
    blocks = mx.unflatten(states.astype(mx.float32), 2, (-1, LAG))
    next_blocks = blocks[:, :, 1:]
    lowest = next_blocks.min(axis=3, keepdims=True)
    span = next_blocks.max(axis=3, keepdims=True) - lowest
    # A coordinate that does not change carries no information.
    scaled = mx.where(span > 0, (blocks[:, :, :-1] - lowest) / span, 0)
    return mx.softmax(mx.std(scaled, axis=-1, ddof=1), axis=-1)
