"""KeyDiff: entries whose keys differ most from the others stay; no attention is needed."""

from dataclasses import dataclass

import mlx.core as mx

from ...entries.entries import Entries
from ...hyperparameters import choice, entry_count
from ..policy import Policy

TINY = 1e-12  # added to squared norms, so that a key of zeros has a direction of zeros


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Policy):
    """Keep the entries whose keys are least similar to an anchor, per KV head (section 3.2, equation 8).

    Attributes:
        anchor: what keys are compared with: "mean" (of the normalised keys, equation 8), "median" (of each
            coordinate), or "pairwise", the mean similarity to every key (equation 7), computed in blocks.
        similarity: "cosine" compares normalised keys; "dot" and "euclidean" compare the keys as they are with their
            mean or median (section 4.3).

    It differs from the paper: by default the first entries stay, and half of the budget is a recent window. Without
    sinks, Gemma 3's predictions moved three times as far; with a window of 10%, SmolLM2's moved twice as far
    (docs/quality.md).
    """

    name = "keydiff"
    summary = "keys least like the mean key"
    paper = "Park et al. 2025, arXiv:2504.15364"

    n_sink: int = 4
    n_window: int | str = entry_count("50%")
    anchor: str = choice("mean", "median", "pairwise")
    similarity: str = choice("cosine", "dot", "euclidean")

    def score(self, entries: Entries) -> mx.array:
        """Minus the similarity, `(B, n_kv_heads, T)` float32; linear in T but for anchor="pairwise"."""
        if self.anchor == "pairwise":
            return -entries.of_keys(lambda part: self._mean_similarity(part, entries))
        if self.anchor == "median":
            anchor = self._median(entries.keys)
        else:
            sums = entries.of_keys(lambda part: self._scaled(part).sum(axis=2, keepdims=True))
            anchor = sums.sum(axis=2, keepdims=True) / len(entries)
        return -entries.of_keys(lambda part: self._similarity(part, anchor)[..., 0])

    def _median(self, keys: mx.array) -> mx.array:
        """A head at a time, since a median sorts a copy."""
        medians: list[mx.array] = []
        for head in range(keys.shape[1]):
            of_head = mx.depends(keys[:, head : head + 1], medians[-1:])
            scaled = self._scaled(of_head.astype(mx.float32))
            medians.append(mx.median(scaled, axis=2, keepdims=True))
        return mx.concatenate(medians, axis=1)

    def _scaled(self, keys: mx.array) -> mx.array:
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

    def _mean_similarity(self, keys: mx.array, entries: Entries) -> mx.array:
        total = entries.of_keys(
            lambda others: self._similarity(keys, others).sum(axis=-1)[:, :, None], keys.shape[2]
        )
        return total.sum(axis=2) / len(entries)


def _squared(keys: mx.array) -> mx.array:
    return (keys * keys).sum(axis=-1, keepdims=True)
