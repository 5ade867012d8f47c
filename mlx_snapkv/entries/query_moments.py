"""Mean and covariance of a layer's pre-RoPE queries, for policies that need these statistics."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import mlx.core as mx


@dataclass(frozen=True)
class Statistics:
    """Mean and covariance of the pre-RoPE queries of each head.

    Attributes:
        mean: `(B, n_heads, head_dim)` float32.
        covariance: `(B, n_heads, head_dim, head_dim)` float32, divided by the number of queries.
        scale: factor by which the attention multiplies its logits.
        stop: position of the next token.
    """

    mean: mx.array
    covariance: mx.array
    scale: float
    stop: int


@dataclass(frozen=True)
class QueryMoments:
    """Sums over queries, from which their statistics are computed.

    The sums never change, so a cache can be restored to earlier sums.

    Attributes:
        sums: three arrays, or none before the first query: a shift `(B, n_heads, 1, head_dim)`, the sum of
            `query - shift`, of the same shape, and the sum of its outer products, `(B, n_heads, head_dim, head_dim)`.
            A cache's `state` includes them, so that mlx-lm's prefill loop evaluates them after each chunk.
        n_counted: number of queries.
        counted_to: position after the last counted query.
    """

    sums: list[mx.array] = field(default_factory=list)
    n_counted: int = 0
    counted_to: int = 0

    def with_queries(self, raw: mx.array, stop: int) -> QueryMoments:
        """Return new sums that include pre-RoPE queries of the positions before `stop`.

        Args:
            raw: `(B, n_heads, n, head_dim)` float32.
            stop: position after the last of these queries.
        """
        B, n_heads, n, D = raw.shape
        if self.sums:
            shift, total, products = self.sums
        else:
            shift = raw.mean(axis=2, keepdims=True)  # avoids cancellation if the mean is large
            total = mx.zeros((B, n_heads, 1, D))
            products = mx.zeros((B, n_heads, D, D))
        shifted = raw - shift
        products = products + shifted.swapaxes(-1, -2) @ shifted
        total = total + shifted.sum(axis=2, keepdims=True)
        return QueryMoments(
            sums=[shift, total, products], n_counted=self.n_counted + n, counted_to=stop
        )

    def inherited_from(self, other: QueryMoments) -> QueryMoments:
        """Return the sums of another cache, which replace the sums of this cache."""
        return replace(self, sums=other.sums, n_counted=other.n_counted)

    def statistics(self, scale: float, stop: int) -> Statistics | None:
        """Return the statistics of all queries, with heads in the model's order; None without queries."""
        if not self.sums:
            return None
        shift, total, products = self.sums
        shifted_mean = total / self.n_counted
        square_of_mean = shifted_mean.swapaxes(-1, -2) @ shifted_mean
        return Statistics(
            mean=(shift + shifted_mean).squeeze(2),
            covariance=products / self.n_counted - square_of_mean,
            scale=scale,
            stop=stop,
        )
