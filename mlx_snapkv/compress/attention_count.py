"""Count the attention that each entry receives, for policies such as H2O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import mlx.core as mx


@dataclass(frozen=True)
class AttentionCount:
    """The attention that entries have received so far, and queries whose attention is not counted yet.

    The queries of single tokens are collected and counted together, because each count reads all keys. The object never
    changes, so a cache can be restored to an earlier count.

    Attributes:
        counts: whether queries are counted. If not, entries keep the attention that they received in another cache.
        received: `(B, n_kv_heads, n)` float32, the attention that the first `n` entries have received.
        waiting: queries that are not counted yet, `(B, n_heads, L, head_dim)` each.
    """

    counts: bool = True
    received: mx.array | None = None
    waiting: list[mx.array] = field(default_factory=list)

    def with_counts(self, received: mx.array | None) -> AttentionCount:
        """Return an object with a new count of received attention and no waiting queries."""
        return replace(self, received=received, waiting=[])

    def with_queries(self, queries: mx.array) -> AttentionCount:
        """Return an object with more waiting queries, `(B, n_heads, L, head_dim)`."""
        return replace(self, waiting=[*self.waiting, queries])

    def total(
        self, shape: tuple[int, ...], votes: Callable[[mx.array], mx.array]
    ) -> mx.array | None:
        """Add the attention of the waiting queries to `received`; None if the attention is unknown.

        Args:
            shape: `(B, n_kv_heads, n)`, the shape of the result.
            votes: returns the attention, of `shape`, that queries `(B, n_heads, L, head_dim)` give to the entries.
        """
        if not self.counts and self.received is None:
            return None
        received = mx.zeros((*shape[:2], 0)) if self.received is None else self.received
        # Number of entries that have not received attention yet.
        n_new = shape[2] - received.shape[2]
        total = mx.pad(received, [(0, 0), (0, 0), (0, n_new)])
        if self.waiting:
            total = total + votes(mx.concatenate(self.waiting, axis=2))
        return total

    @property
    def arrays(self) -> list[mx.array]:
        """Return the arrays that are evaluated between two decoded tokens."""
        received = [] if self.received is None else [self.received]
        return [*self.waiting, *received]
