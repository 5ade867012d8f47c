"""KeyDiff: keep the entries whose keys differ most from the rest, without computing attention."""

from dataclasses import dataclass

import mlx.core as mx

from ...entries.entries import Entries
from ...hyperparameters import choice, entry_count
from ..policy import Policy

TINY = 1e-12  # added to squared norms so that a zero key can be normalised


@dataclass(frozen=True, kw_only=True)
class KeyDiff(Policy):
    """Keeps the entries whose keys are least similar to an anchor, per KV head (section 3.2, equation 8).

    Attributes:
        anchor: what each key is compared with: the "mean" of the keys (equation 8), the "median" of each coordinate, or
            all keys ("pairwise", equation 7). "pairwise" averages the similarities. With similarity="cosine", the keys
            are normalised first.
        similarity: "cosine" compares normalised keys; "dot" and "euclidean" compare the keys as they are (section 4.3).

    Differences from the paper: by default, a sink is kept, and half of the budget goes to a recent window.
    """

    name = "keydiff"
    summary = "keys least like the mean key"
    paper = "Park et al. 2025, arXiv:2504.15364"

    n_sink: int = 4
    n_window: int | str = entry_count("50%")
    anchor: str = choice("mean", "median", "pairwise")
    similarity: str = choice("cosine", "dot", "euclidean")

    def score(self, entries: Entries) -> mx.array:
        """Return each key's negative similarity to the anchor, `(B, n_kv_heads, T)` float32.

        The cost is linear in T, or quadratic for anchor="pairwise".
        """
        if self.anchor == "pairwise":
            return -entries.map_keys(lambda keys: self._mean_similarity(keys, entries))
        anchor = self._median(entries.keys) if self.anchor == "median" else self._mean(entries)
        return -entries.map_keys(lambda keys: self._similarity(keys, anchor)[..., 0])

    def _mean(self, entries: Entries) -> mx.array:
        """Return the mean key, `(B, n_kv_heads, 1, head_dim)` float32."""

        def sum_of_block(keys: mx.array) -> mx.array:
            return self._keys_for_anchor(keys).sum(axis=2, keepdims=True)

        block_sums = entries.map_keys(sum_of_block)
        return block_sums.sum(axis=2, keepdims=True) / len(entries)

    def _median(self, keys: mx.array) -> mx.array:
        """Return the median of each coordinate, `(B, n_kv_heads, 1, head_dim)` float32.

        Heads are processed one at a time, because computing a median sorts a copy of the keys.
        """
        medians: list[mx.array] = []
        for head in range(keys.shape[1]):
            # Wait for the previous head's median, so that only one head's float32 keys are in memory at a time.
            previous_median = medians[-1:]  # empty for the first head
            keys_of_head = mx.depends(keys[:, head : head + 1], previous_median)
            anchor_keys = self._keys_for_anchor(keys_of_head.astype(mx.float32))
            medians.append(mx.median(anchor_keys, axis=2, keepdims=True))
        return mx.concatenate(medians, axis=1)

    def _keys_for_anchor(self, keys: mx.array) -> mx.array:
        """Return the keys to compute the anchor from, normalised if similarity="cosine"."""
        if self.similarity != "cosine":
            return keys
        return keys * mx.rsqrt(_squared_norm(keys) + TINY)

    def _similarity(self, keys: mx.array, others: mx.array) -> mx.array:
        """Return the similarity of each key to each of `others`, `(B, n_kv_heads, n, m)`.

        For similarity="euclidean", this is the negative distance.

        Args:
            keys: `(B, n_kv_heads, n, head_dim)` float32.
            others: `(B, n_kv_heads, m, head_dim)` float32.
        """
        product = keys @ others.swapaxes(-1, -2)
        if self.similarity == "dot":
            return product
        squares = _squared_norm(keys)
        other_squares = _squared_norm(others).swapaxes(-1, -2)
        if self.similarity == "cosine":
            return product * mx.rsqrt(squares + TINY) * mx.rsqrt(other_squares + TINY)
        # Rounding could make the square of a small distance negative.
        return -mx.sqrt(mx.maximum(squares + other_squares - 2 * product, 0))

    def _mean_similarity(self, keys: mx.array, entries: Entries) -> mx.array:
        """Return the mean similarity of `n` keys to all keys, `(B, n_kv_heads, n)`."""

        def sum_over_block(others: mx.array) -> mx.array:
            return self._similarity(keys, others).sum(axis=-1)[:, :, None]

        n_keys = keys.shape[2]
        block_sums = entries.map_keys(sum_over_block, width=n_keys)  # (B, n_kv_heads, n_blocks, n)
        return block_sums.sum(axis=2) / len(entries)


def _squared_norm(keys: mx.array) -> mx.array:
    """Return the squared L2 norms `(..., 1)` of keys `(..., head_dim)`."""
    return (keys * keys).sum(axis=-1, keepdims=True)
