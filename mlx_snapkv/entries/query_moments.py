"""Mean and covariance of a layer's pre-RoPE queries, for policies that need them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import mlx.core as mx


@dataclass(frozen=True)
class Statistics:
    """Mean and covariance of each head's pre-RoPE queries.

    Attributes:
        mean: `(B, n_heads, head_dim)` float32.
        covariance: `(B, n_heads, head_dim, head_dim)` float32, normalised by the number of queries.
        scale: scale of the attention logits.
        stop: position of the next token.
    """

    mean: mx.array
    covariance: mx.array
    scale: float
    stop: int


@dataclass(frozen=True)
class QueryMoments:
    """Sums over queries, for computing their mean and covariance.

    The object is immutable, so restoring a cache to an earlier state restores its sums.

    Attributes:
        sums: empty before the first query. Then three arrays: `shift`, the mean of the queries that were added first,
            `(B, n_heads, 1, head_dim)`; the sum of `query - shift`, in the same shape; and the sum of the outer
            products of `query - shift` with itself, `(B, n_heads, head_dim, head_dim)`. The arrays are part of a
            cache's `state`, so mlx-lm's prefill loop evaluates them after each chunk.
        n_counted: number of queries in the sums.
        counted_to: position after the last counted query.
    """

    sums: list[mx.array] = field(default_factory=list)
    n_counted: int = 0
    counted_to: int = 0

    def with_queries(self, raw_queries: mx.array, stop: int) -> QueryMoments:
        """Return sums that also include `raw_queries`.

        Args:
            raw_queries: pre-RoPE queries, `(B, n_heads, n, head_dim)` float32.
            stop: position after the last of these queries.
        """
        B, n_heads, n, D = raw_queries.shape
        if self.sums:
            shift, query_sum, product_sum = self.sums
        else:
            # Subtract the first queries' mean, because a large mean would cause cancellation in the covariance.
            shift = raw_queries.mean(axis=2, keepdims=True)
            query_sum = mx.zeros((B, n_heads, 1, D))
            product_sum = mx.zeros((B, n_heads, D, D))
        shifted_queries = raw_queries - shift
        product_sum = product_sum + shifted_queries.swapaxes(-1, -2) @ shifted_queries
        query_sum = query_sum + shifted_queries.sum(axis=2, keepdims=True)
        return QueryMoments(
            sums=[shift, query_sum, product_sum], n_counted=self.n_counted + n, counted_to=stop
        )

    def with_sums_of(self, other: QueryMoments) -> QueryMoments:
        """Return `other`'s sums and number of queries, with this object's `counted_to`."""
        return replace(self, sums=other.sums, n_counted=other.n_counted)

    def statistics(self, scale: float, stop: int) -> Statistics | None:
        """Return the statistics of all queries, with heads in the model's order, or None if there are no queries."""
        if not self.sums:
            return None
        shift, query_sum, product_sum = self.sums
        shifted_mean = query_sum / self.n_counted
        square_of_mean = shifted_mean.swapaxes(-1, -2) @ shifted_mean
        return Statistics(
            mean=(shift + shifted_mean).squeeze(2),
            covariance=product_sum / self.n_counted - square_of_mean,
            scale=scale,
            stop=stop,
        )
