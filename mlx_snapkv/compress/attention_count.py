"""The attention that every entry has received, counted for policies that ask for it, as H2O does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import mlx.core as mx


@dataclass(frozen=True)
class AttentionCount:
    """What the queries counted so far gave each entry, and the queries that are still to be counted.

    Queries wait, as counting those of single tokens one by one would read all keys for each. A count never changes, so
    a cache that is restored has the one before.
    """

    # Queries are counted; if not, entries keep what they had received elsewhere.
    counts: bool = True
    received: mx.array | None = None  # float32 `(B, n_kv_heads, n)`, of the first `n` entries
    waiting: list[mx.array] = field(default_factory=list)  # `(B, n_heads, L, head_dim)` each

    def of_entries(self, received: mx.array | None) -> AttentionCount:
        """For the entries that stay, which had received this; nothing waits."""
        return replace(self, received=received, waiting=[])

    def with_queries(self, queries: mx.array) -> AttentionCount:
        """With the newest tokens' queries waiting."""
        return replace(self, waiting=[*self.waiting, queries])

    def total(
        self, shape: tuple[int, ...], votes: Callable[[mx.array], mx.array]
    ) -> mx.array | None:
        """What each of the entries `shape` `(B, n_kv_heads, n)` has received, float32; None if that is not known.

        Args:
            votes: the attention that waiting queries give each entry.
        """
        if not self.counts and self.received is None:
            return None
        received = mx.zeros((*shape[:2], 0)) if self.received is None else self.received
        received = mx.pad(received, [(0, 0), (0, 0), (0, shape[2] - received.shape[2])])
        if self.waiting:
            received = received + votes(mx.concatenate(self.waiting, axis=2))
        return received

    @property
    def arrays(self) -> list[mx.array]:
        """What is to be evaluated between two tokens."""
        return [*self.waiting, *([] if self.received is None else [self.received])]
