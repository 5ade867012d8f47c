"""CriticalKV: what is read from an entry counts, not only how often it is read.

Feng et al., "Identify Critical KV Cache in LLM Inference from an Output Perturbation Perspective", 2025
(arXiv:2502.03805).
"""

import mlx.core as mx

from ..entries.attention import READ_TOKENS
from ..entries.entries import Entries
from ..entries.selection import top_positions

EPSILON = 1e-4  # added to the weights of the second stage
CERTAIN = 1e30  # what the first stage's weights are multiplied by, to be above all of the second's
WRITTEN_BYTES = 8 << 20  # of float32 that a block of values is projected to


def two_stages(
    weights: mx.array, entries: Entries, start: int, n_certain: int, n_heads: int
) -> mx.array:
    """Scores `(B, n_kv_heads, n)` of the entries `[start, start + n)`.

    Those with the `n_certain` highest weights come first, in their order; the others are ranked by weight times the
    size of the projected value.

    Args:
        weights: float32 `(B, n_kv_heads, n)`, not negative: mean attention that the entries receive from a query.
        n_certain: entries that the first stage chooses; 0 or less is none.
        n_heads: query heads.
    """
    n = weights.shape[-1]
    scores = (weights + EPSILON) * written_norms(entries, start, start + n, n_heads)
    n_certain = min(n_certain, n)
    if n_certain <= 0:
        return scores
    best = top_positions(weights, n_certain)
    first = (mx.take_along_axis(weights, best, axis=-1) + EPSILON) * CERTAIN
    return mx.put_along_axis(scores, best, first, axis=-1)


def written_norms(entries: Entries, start: int, stop: int, n_heads: int) -> mx.array:
    """How much the entries `[start, stop)` write to the residual stream if they are read in full.

    The sum of the absolute coordinates of the projected value, averaged over the query heads of a GQA group: float32
    `(B, n_kv_heads, stop - start)`. It is computed block by block, a KV head at a time.
    """
    one = entries.read_values(start, start + 1)
    weights = [
        entries.layer.output_weights(head, n_heads, one).swapaxes(0, 1)
        for head in range(one.shape[1])
    ]
    width = weights[0].shape[1] * weights[0].shape[2]
    size = max(64, WRITTEN_BYTES // (4 * one.shape[0] * width))
    read_at_once = READ_TOKENS if entries.waits else size
    norms: list[mx.array] = []
    for begin in range(start, stop, read_at_once):
        end = min(stop, begin + read_at_once)
        values = entries.read_values(begin, end)
        for first in range(0, end - begin, size):
            block = values[:, :, first : first + size]
            norms.append(_block_norms(block, weights, after=norms[-1:]))
        if entries.waits:
            mx.eval(norms)
    return mx.concatenate(norms, axis=-1)


def _block_norms(values: mx.array, weights: list[mx.array], after: list[mx.array]) -> mx.array:
    """Of values `(B, n_kv_heads, n, head_dim)`; by KV head, weights are `(head_dim, group, hidden_size)`."""
    sums: list[mx.array] = []
    for head, weight in enumerate(weights):
        part, before = values[:, head], sums[-1:] or after
        part = mx.depends(part, before) if before else part
        written = part.astype(mx.float32) @ weight.astype(mx.float32).flatten(1)
        sums.append(mx.abs(written).sum(axis=-1) / weight.shape[1])
    return mx.stack(sums, axis=1)
