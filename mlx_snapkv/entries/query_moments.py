"""Moments of a layer's pre-RoPE queries, summed up as they come, for policies that ask for their statistics."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import mlx.core as mx


@dataclass(frozen=True)
class Statistics:
    """Moments of the pre-RoPE queries, each head for itself."""

    mean: mx.array  # `(B, n_heads, head_dim)` float32
    covariance: mx.array  # the same by `head_dim`, divided by the number of queries
    scale: float  # what the attention multiplies its logits by
    stop: int  # position of the next token


@dataclass(frozen=True)
class QueryMoments:
    """The sums so far. They never change, so a cache that is restored has those before."""

    # A shift, and the sums of `query - shift` and of its outer products, or nothing. A cache's `state` holds them, so
    # that mlx-lm computes them with every chunk.
    sums: list[mx.array] = field(default_factory=list)
    n_counted: int = 0
    counted_to: int = 0  # the position after the last one counted

    def with_queries(self, raw: mx.array, stop: int) -> QueryMoments:
        """With pre-RoPE queries `(B, n_heads, n, head_dim)` float32, the last one before position `stop`."""
        sums = self.sums
        if not sums:
            B, n_heads, _, D = raw.shape
            shift = raw.mean(axis=2, keepdims=True)  # so that a large mean costs no digits
            sums = [shift, mx.zeros((B, n_heads, 1, D)), mx.zeros((B, n_heads, D, D))]
        shift, total, products = sums
        raw = raw - shift
        products = products + raw.swapaxes(-1, -2) @ raw
        sums = [shift, total + raw.sum(axis=2, keepdims=True), products]
        return QueryMoments(sums, self.n_counted + raw.shape[2], stop)

    def inherited_from(self, others: QueryMoments) -> QueryMoments:
        """The sums of another cache's queries, which stand for those of the queries to come."""
        return replace(self, sums=others.sums, n_counted=others.n_counted)

    def statistics(self, scale: float, stop: int) -> Statistics | None:
        """Of the queries counted so far, heads in their own order; None if there are none."""
        if not self.sums:
            return None
        shift, total, products = self.sums
        away = total / self.n_counted
        covariance = products / self.n_counted - away.swapaxes(-1, -2) @ away
        return Statistics((shift + away).squeeze(2), covariance, scale, stop)
