"""Figures of all of a layer's KV heads, of which each rank may have some."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from .ranks import ALONE, Ranks


@dataclass(frozen=True)
class Heads:
    """Which of a layer's KV heads are here, and what is to be asked of all. Nothing is computed yet.

    Attributes:
        ranks: those that share the layer's heads out, in contiguous slices; `ALONE` if all are here.
    """

    ranks: Ranks = ALONE

    def first(self, n_here: int) -> int:
        """The number, among all, of the first of `n_here` heads here."""
        return self.ranks.rank * n_here

    def mean(self, x: mx.array) -> mx.array:
        """Of `(B, n_kv_heads, T)`, the mean over all heads, `(B, 1, T)`."""
        if self.ranks.size == 1:
            return x.mean(axis=1, keepdims=True)
        return self.ranks.sum(x.sum(axis=1, keepdims=True)) / (x.shape[1] * self.ranks.size)

    def max(self, x: mx.array) -> mx.array:
        """The largest of all heads of what was made of the heads here, element by element."""
        return self.ranks.max(x)

    def sum(self, x: mx.array) -> mx.array:
        """The sum over all heads of sums over the heads here, element by element."""
        return self.ranks.sum(x)


ALL_HERE = Heads()
