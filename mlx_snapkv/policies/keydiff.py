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
from .snapkv import pool_votes

TINY = 1e-12  # added to squared norms, so that a key of zeros has a direction of zeros

ANCHORS = ("mean", "median", "pairwise")
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
    """

    name = "keydiff"
    summary = "keys least like the mean key"
    paper = "Park et al. 2025, arXiv:2504.15364"

    anchor: str = "mean"
    similarity: str = "cosine"
    pool_kernel: int = 1

    def __post_init__(self):
        super().__post_init__()
        self._require("anchor", self.anchor in ANCHORS, ", ".join(ANCHORS))
        self._require("similarity", self.similarity in SIMILARITIES, ", ".join(SIMILARITIES))
        self._require_count("pool_kernel", least=1, most=255)
        self._require("pool_kernel", self.pool_kernel % 2 == 1, "odd")

    def score(self, entries: Entries) -> mx.array:
        """Minus the similarity, `(B, n_kv_heads, T)` float32; linear in T but for anchor="pairwise"."""
        scores = self._differences(entries)
        if self.pool_kernel == 1:
            return scores
        least = scores.min(axis=-1, keepdims=True)  # what lies outside counts as much as the lowest
        return pool_votes(scores - least, "avg", self.pool_kernel) + least

    def _differences(self, entries: Entries) -> mx.array:
        keys = entries.keys
        if self.anchor == "pairwise":
            return -_joined(keys, lambda part: self._mean_similarity(part, keys))
        anchor = self._anchor(keys)
        return -_joined(keys, lambda part: self._similarity(part, anchor)[..., 0])

    def _anchor(self, keys: mx.array) -> mx.array:
        """`(B, n_kv_heads, 1, head_dim)`."""
        if self.anchor == "median":
            return self._median(keys)
        sums = _by_block(keys, lambda part: self._weighted(part).sum(axis=2, keepdims=True))
        return sum(sums[1:], sums[0]) / keys.shape[2]

    def _median(self, keys: mx.array) -> mx.array:
        """Of each coordinate, a few at a time: a median sorts a copy."""
        B, H, T, D = keys.shape
        width = max(1, BLOCK_BYTES // (4 * B * T))
        factors = None
        if self.similarity == "cosine":
            factors = _joined(keys, lambda part: mx.rsqrt(_squared(part) + TINY))
        heads: list[mx.array] = []
        last: list[mx.array] = []
        for head in range(H):
            parts: list[mx.array] = []
            for start in range(0, D, width):
                block = keys[:, head : head + 1, :, start : start + width]
                block = _after(last, block).astype(mx.float32)
                if factors is not None:
                    block = block * factors[:, head : head + 1]
                parts.append(mx.median(block.swapaxes(2, 3), axis=3, keepdims=True))
                last = parts[-1:]
            heads.append(mx.concatenate(parts, axis=2).swapaxes(2, 3))
        return mx.concatenate(heads, axis=1)

    def _weighted(self, keys: mx.array) -> mx.array:
        """Keys as the anchor is made of: of length one for the cosine."""
        if self.similarity != "cosine":
            return keys
        return keys * mx.rsqrt(_squared(keys) + TINY)

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


def _joined(keys: mx.array, function: Callable[[mx.array], mx.array]) -> mx.array:
    return mx.concatenate(_by_block(keys, function), axis=2)


def _by_block(
    keys: mx.array, function: Callable[[mx.array], mx.array], width: int = 0
) -> list[mx.array]:
    """`function` of the keys in float32, block by block of T.

    Args:
        width: numbers made of each key, if they are more than `head_dim`; `BLOCK_BYTES` hold those of a block.
    """
    B, H, T, D = keys.shape
    size = max(64, BLOCK_BYTES // (4 * B * H * max(D, width)))
    parts: list[mx.array] = []
    for start in range(0, T, size):
        block = _after(parts[-1:], keys[:, :, start : start + size])
        parts.append(function(block.astype(mx.float32)))
    return parts


def _after(before: list[mx.array], block: mx.array) -> mx.array:
    """The block, to be computed with after what is `before`, so that the memory of one block is enough."""
    return mx.depends(block, before) if before else block
