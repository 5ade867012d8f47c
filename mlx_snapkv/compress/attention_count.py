"""Accumulate the attention that each entry receives, for policies such as H2O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import mlx.core as mx


@dataclass(frozen=True)
class AttentionCount:
    """The attention that entries have received so far, and the queries not yet counted.

    Counting reads all keys, so single-token queries are collected and counted together. Instances are immutable, so a
    cache can be restored to an earlier count.

    Attributes:
        is_counting: whether queries are counted. If not, entries keep the attention they received in an earlier cache.
        received_attention: attention received by the first `n` entries, `(B, n_kv_heads, n)` float32.
        waiting_queries: queries not yet counted, `(B, n_heads, L, head_dim)` each.
    """

    is_counting: bool = True
    received_attention: mx.array | None = None
    waiting_queries: list[mx.array] = field(default_factory=list)

    def restarted_from(self, received_attention: mx.array | None) -> AttentionCount:
        """Return a copy with this received attention and no waiting queries."""
        return replace(self, received_attention=received_attention, waiting_queries=[])

    def with_queries(self, queries: mx.array) -> AttentionCount:
        """Return a copy with additional waiting queries, `(B, n_heads, L, head_dim)`."""
        return replace(self, waiting_queries=[*self.waiting_queries, queries])

    def total_attention(
        self, entries_shape: tuple[int, ...], count_votes: Callable[[mx.array], mx.array]
    ) -> mx.array | None:
        """Return the attention received so far, including from waiting queries, or None if unknown.

        Args:
            entries_shape: shape of the entries and of the result, `(B, n_kv_heads, n)`.
            count_votes: maps queries `(B, n_heads, L, head_dim)` to the attention that each entry receives from them.
        """
        if not self.is_counting and self.received_attention is None:
            return None
        B, H, n_entries = entries_shape
        received_attention = self.received_attention
        if received_attention is None:
            received_attention = mx.zeros((B, H, 0))
        # Entries appended since the last count have not received any attention yet.
        n_new = n_entries - received_attention.shape[2]
        total = mx.pad(received_attention, [(0, 0), (0, 0), (0, n_new)])
        if self.waiting_queries:
            total = total + count_votes(mx.concatenate(self.waiting_queries, axis=2))
        return total

    @property
    def arrays(self) -> list[mx.array]:
        """Return the arrays to evaluate after each decoded token."""
        if self.received_attention is None:
            return list(self.waiting_queries)
        return [*self.waiting_queries, self.received_attention]
