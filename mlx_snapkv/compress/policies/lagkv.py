"""LagKV: keep the entries that differ most from the following block of entries."""

from dataclasses import dataclass

import mlx.core as mx

from ...entries.attention import BLOCK_BYTES, FLOAT_BYTES
from ...entries.entries import Entries
from ...entries.spans import spans
from ..policy import Policy

LAG = 128  # entries per block


@dataclass(frozen=True, kw_only=True)
class LagKV(Policy):
    """Scores the entries after the sink by comparing each block of 128 entries with the next block.

    Each coordinate of the keys and values is scaled by its minimum and maximum in the next block. The standard
    deviations of an entry's scaled key and scaled value each go through a softmax over the block, and the
    results are added. An entry's score is the rank of its sum within the block, so every block keeps the same number of
    entries.
    The last full block has no full block after it. Its entries and all later entries therefore score highest, in order
    of recency. With fewer than 256 entries after the sink, all entries are scored by recency.

    Attributes:
        n_sink: number of initial entries that are always kept and belong to no block.

    Difference from the paper: each eviction divides the remaining entries into new blocks.
    """

    name = "lagkv"
    summary = "entries that differ most from the block after theirs"
    paper = "Liang et al. 2025, arXiv:2504.04704"

    n_sink: int = 4

    def score(self, entries: Entries) -> mx.array:
        """Return scores `(B, n_kv_heads, T)` float32, highest from the last full block on."""
        T = len(entries)
        n_blocks = (T - self.n_sink) // LAG
        recency = mx.arange(T) / T
        B, H, _, D = entries.read_keys(0, 1).shape
        if n_blocks < 2:
            return mx.broadcast_to(recency, (B, H, T))
        bytes_per_block = FLOAT_BYTES * B * H * LAG * D
        blocks_at_once = max(1, BLOCK_BYTES // bytes_per_block)
        last_block_start = self.n_sink + (n_blocks - 1) * LAG

        def ranks_in_blocks(start: int, stop: int, after: list[mx.array]) -> mx.array:
            # Also read the block after the span, because the span's last block is compared with it.
            key_differences = _differences(entries.read_keys(start, stop + LAG, after))
            value_differences = _differences(entries.read_values(start, stop + LAG, after))
            order = mx.argsort(key_differences + value_differences, axis=-1)
            ranks = mx.argsort(order, axis=-1)  # the inverse permutation
            return ranks.astype(mx.float32).flatten(2) / LAG

        block_spans = spans(self.n_sink, last_block_start, blocks_at_once * LAG)
        ranked_scores = entries.map_blocks(ranks_in_blocks, block_spans)
        sink_scores = mx.ones((B, H, self.n_sink))
        newest_scores = recency[last_block_start:] + 1  # above all ranks
        newest_scores = mx.broadcast_to(newest_scores, (B, H, T - last_block_start))
        return mx.concatenate([sink_scores, ranked_scores, newest_scores], axis=-1)


def _differences(states: mx.array) -> mx.array:
    """Return how much each entry differs from the next block, `(B, n_kv_heads, n_blocks - 1, LAG)` float32.

    Coordinates are scaled by their range in the next block, `(x - min) / (max - min)`. The result is a softmax, over
    the entries of a block, of the standard deviations of their scaled coordinates.

    Args:
        states: keys or values, `(B, n_kv_heads, n_blocks * LAG, head_dim)`. The last block only provides the minimum
            and maximum for the block before it.
    """
    blocks = mx.unflatten(states.astype(mx.float32), 2, (-1, LAG))
    next_blocks = blocks[:, :, 1:]
    minimum = next_blocks.min(axis=3, keepdims=True)
    value_range = next_blocks.max(axis=3, keepdims=True) - minimum
    # A constant coordinate carries no information.
    scaled = mx.where(value_range > 0, (blocks[:, :, :-1] - minimum) / value_range, 0)
    return mx.softmax(mx.std(scaled, axis=-1, ddof=1), axis=-1)
