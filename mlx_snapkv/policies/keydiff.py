"""KeyDiff: entries whose keys differ most from the others stay; no attention is needed.

Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
Resource-Constrained Environments", 2025 (arXiv:2504.15364).
"""

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx

from ..entries.attention import BLOCK_BYTES
from ..entries.entries import Entries
from .base import Policy
from .options import choice, count, entry_count
from .snapkv import pool_votes

TINY = 1e-12  # added to squared norms, so that a key of zeros has a direction of zeros
SIMILARITIES = ("cosine", "dot", "euclidean")


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Policy):
    """The entries whose keys are least similar to an anchor, per KV head (section 3.2, equation 8).

    Attributes:
        anchor: what keys are compared with: "mean" (of the normalised keys, equation 8), "median" (of each
            coordinate), or "pairwise": the mean similarity to every key (equation 7), computed in blocks.
        similarity: "cosine"; "dot" and "euclidean" compare the keys as they are, with the mean or median
            of the keys as they are (section 4.3).
        pool_kernel: odd width of the average over the scores of neighbours among the entries held, as SnapKV's votes
            are pooled; 1 is none, as in the paper. Entries near a distinct one are kept with it.

    Differs from the paper in that half of the budget is a recent window by default: distinct keys alone cost two real
    models up to twice as much of their predictions (docs/quality.md).
    """

    name = "keydiff"
    summary = "keys least like the mean key"
    paper = "Park et al. 2025, arXiv:2504.15364"

    n_window: int | str = entry_count("50%")
    anchor: str = choice("mean", "median", "pairwise")
    similarity: str = choice(*SIMILARITIES)
    pool_kernel: int = count(1, least=1, most=255)

    def __post_init__(self):
        super().__post_init__()
        self._require("pool_kernel", self.pool_kernel % 2 == 1, "odd")

    def score(self, entries: Entries) -> mx.array:
        """Minus the similarity, `(B, n_kv_heads, T)` float32; linear in T but for anchor="pairwise"."""
        keys = entries.keys
        if self.anchor == "pairwise":
            parts = _by_block(keys, lambda part: self._mean_similarity(part, keys))
        else:
            anchor = self._median(keys) if self.anchor == "median" else self._mean(keys)
            parts = _by_block(keys, lambda part: self._similarity(part, anchor)[..., 0])
        scores = -mx.concatenate(parts, axis=2)
        if self.pool_kernel == 1:
            return scores
        least = scores.min(axis=-1, keepdims=True)  # what lies outside counts as much as the lowest
        return pool_votes(scores - least, "avg", self.pool_kernel) + least

    def _mean(self, keys: mx.array) -> mx.array:
        """`(B, n_kv_heads, 1, head_dim)`."""
        sums = _by_block(keys, lambda part: self._scaled(part).sum(axis=2, keepdims=True))
        return sum(sums[1:], sums[0]) / keys.shape[2]

    def _median(self, keys: mx.array) -> mx.array:
        """Of each coordinate, `(B, n_kv_heads, 1, head_dim)`: a head at a time, since a median sorts a copy."""
        medians: list[mx.array] = []
        for head in range(keys.shape[1]):
            of_head = _after(medians[-1:], keys[:, head : head + 1]).astype(mx.float32)
            medians.append(mx.median(self._scaled(of_head), axis=2, keepdims=True))
        return mx.concatenate(medians, axis=1)

    def _scaled(self, keys: mx.array) -> mx.array:
        """Keys as the anchor is computed from: of length one for the cosine."""
        return keys * mx.rsqrt(_squared(keys) + TINY) if self.similarity == "cosine" else keys

    def _similarity(self, keys: mx.array, others: mx.array) -> mx.array:
        """Of keys `(B, n_kv_heads, n, head_dim)` to `(B, n_kv_heads, m, head_dim)`: `(B, n_kv_heads, n, m)`."""
        product = keys @ others.swapaxes(-1, -2)
        if self.similarity == "dot":
            return product
        mine, theirs = _squared(keys), _squared(others).swapaxes(-1, -2)
        if self.similarity == "cosine":
            return product * mx.rsqrt(mine + TINY) * mx.rsqrt(theirs + TINY)
        return -mx.sqrt(mx.maximum(mine + theirs - 2 * product, 0))

    def _mean_similarity(self, keys: mx.array, all_keys: mx.array) -> mx.array:
        sums = _by_block(all_keys, lambda k: self._similarity(keys, k).sum(axis=-1), keys.shape[2])
        return sum(sums[1:], sums[0]) / all_keys.shape[2]


def _squared(keys: mx.array) -> mx.array:
    return (keys * keys).sum(axis=-1, keepdims=True)


def _by_block(
    keys: mx.array, function: Callable[[mx.array], mx.array], width: int = 0
) -> list[mx.array]:
    """`function` of the keys in float32, block by block of T, one after the other.

    Args:
        width: numbers computed from each key, if more than `head_dim`; `BLOCK_BYTES` hold those of a block.
    """
    B, H, T, D = keys.shape
    size = max(64, BLOCK_BYTES // (4 * B * H * max(D, width)))
    parts: list[mx.array] = []
    for start in range(0, T, size):
        block = _after(parts[-1:], keys[:, :, start : start + size])
        parts.append(function(block.astype(mx.float32)))
    return parts


def _after(before: list[mx.array], block: mx.array) -> mx.array:
    """The block, computed with only after `before`, so that the memory of one block is enough."""
    return mx.depends(block, before) if before else block
