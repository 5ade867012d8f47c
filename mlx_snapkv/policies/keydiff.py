"""KeyDiff: rows whose keys differ most from the others stay; no attention is needed.

Park et al., "KeyDiff: Key Similarity-Based KV Cache Eviction for Long-Context LLM Inference in
Resource-Constrained Environments", 2025 (arXiv:2504.15364).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ..entries.attention import BLOCK_BYTES
from ..entries.entries import Rows
from .base import Policy

TINY = 1e-12  # added to squared norms, so that a key of zeros has a direction of zeros

ANCHORS = ("mean", "median", "pairwise")
SIMILARITIES = ("cosine", "dot", "euclidean")


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Policy):
    """The rows whose keys are least similar to an anchor, per KV head (section 3.2, equation 8).

    Attributes:
        anchor: what keys are compared with: "mean" (of the normalised keys, equation 8), "median" (of each
            coordinate), or "pairwise": the mean similarity to every key (equation 7), computed in blocks.
        similarity: "cosine"; "dot" and "euclidean" compare the keys as they are, with the mean or median
            of the keys as they are (section 4.3).

    The rest is `Policy`'s. The recent rows matter: see docs/quality.md.
    """

    name: ClassVar[str] = "keydiff"
    summary: ClassVar[str] = "keys least like the mean key"
    paper: ClassVar[str] = "Park et al. 2025, arXiv:2504.15364"

    anchor: str = "mean"
    similarity: str = "cosine"

    def __post_init__(self):
        super().__post_init__()
        self._require("anchor", self.anchor in ANCHORS, ", ".join(ANCHORS))
        self._require("similarity", self.similarity in SIMILARITIES, ", ".join(SIMILARITIES))

    def score(self, rows: Rows) -> mx.array:
        """Minus the similarity, `(B, n_kv_heads, T)` float32; linear in T but for anchor="pairwise"."""
        if self.anchor == "pairwise":
            return -_in_blocks(rows.keys, lambda part: self._mean_similarity(part, rows.keys))
        anchor = self._anchor(rows.keys)
        return -_in_blocks(rows.keys, lambda part: self._similarity(part, anchor)[..., 0])

    def _anchor(self, keys: mx.array) -> mx.array:
        """`(B, n_kv_heads, 1, head_dim)`."""
        if self.anchor == "median":
            heads = mx.split(keys, keys.shape[1], axis=1)  # a median sorts a copy
            return mx.concatenate([self._median(head) for head in heads], axis=1)
        total = _in_blocks(keys, lambda part: self._weighted(part).sum(axis=2, keepdims=True))
        return total.sum(axis=2, keepdims=True) / keys.shape[2]

    def _median(self, keys: mx.array) -> mx.array:
        middle = mx.median(self._weighted(keys.astype(mx.float32)), axis=2, keepdims=True)
        mx.eval(middle)
        return middle

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
        total = _in_blocks(
            all_keys,
            lambda part: self._similarity(keys, part).sum(axis=-1)[:, :, None],
            width=keys.shape[2],
        )
        return total.sum(axis=2) / all_keys.shape[2]


def _squared(keys: mx.array) -> mx.array:
    return (keys * keys).sum(axis=-1, keepdims=True)


def _in_blocks(
    keys: mx.array, function: Callable[[mx.array], mx.array], width: int | None = None
) -> mx.array:
    """`function` of the keys in float32, block by block, joined along T.

    Args:
        width: numbers made of each key; by default `head_dim`.
    """
    B, H, T, D = keys.shape
    block = max(64, BLOCK_BYTES // (4 * B * H * max(D, width or 0)))
    parts = []
    for start in range(0, T, block):
        parts.append(function(keys[:, :, start : start + block].astype(mx.float32)))
        mx.eval(parts[-1])
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)
