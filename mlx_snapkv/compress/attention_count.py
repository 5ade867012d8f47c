"""Accumulate the attention that each entry receives, for policies such as H2O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import mlx.core as mx


@dataclass(frozen=True)
class AttentionCount:
    """The attention that entries have received so far, and queries that are still to be counted.

    Each count reads all keys, so the queries of single tokens are collected and counted together. The object is
    immutable, so that a cache can be restored to an earlier count.

    Attributes:
        counts: whether queries are counted. If not, entries keep the attention that they received in another cache.
        received: attention that the first `n` entries have received, `(B, n_kv_heads, n)` float32.
        waiting: queries that are not counted yet, `(B, n_heads, L, head_dim)` each.
    """

    counts: bool = True
    received: mx.array | None = None
    waiting: list[mx.array] = field(default_factory=list)

    def with_counts(self, received: mx.array | None) -> AttentionCount:
        """Return a copy with a new count of received attention and no waiting queries."""
        return replace(self, received=received, waiting=[])

    def with_queries(self, queries: mx.array) -> AttentionCount:
        """Return a copy with additional waiting queries, `(B, n_heads, L, head_dim)`."""
        return replace(self, waiting=[*self.waiting, queries])

    def total(
        self, shape: tuple[int, ...], votes: Callable[[mx.array], mx.array]
    ) -> mx.array | None:
        """Return the attention received so far, waiting queries included, or None if it is unknown.

        Args:
            shape: shape of the result, `(B, n_kv_heads, n)`.
            votes: takes queries `(B, n_heads, L, head_dim)`, and returns the attention that they give to each entry.
        """
        if not self.counts and self.received is None:
            return None
        received = mx.zeros((*shape[:2], 0)) if self.received is None else self.received
        # Entries appended since the last count have not received any attention yet.
        n_new = shape[2] - received.shape[2]
        total = mx.pad(received, [(0, 0), (0, 0), (0, n_new)])
        if self.waiting:
            total = total + votes(mx.concatenate(self.waiting, axis=2))
        return total

    @property
    def arrays(self) -> list[mx.array]:
        """Return the arrays to evaluate after each decoded token."""
        received = [] if self.received is None else [self.received]
        return [*self.waiting, *received]
