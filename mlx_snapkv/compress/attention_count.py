"""The attention that each entry has received, counted for policies that ask for it, such as H2O."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import mlx.core as mx


@dataclass(frozen=True)
class AttentionCount:
    """The attention that entries have received so far, and the queries that have yet to be counted.

    Queries of single tokens wait and are counted together, because every count reads all keys. A count never changes,
    so a cache can be restored to an earlier count.

    Attributes:
        counts: whether queries are counted. If not, entries keep the attention that they received in another cache.
        received: `(B, n_kv_heads, n)` float32, the attention that the first `n` entries have received.
        waiting: queries that have yet to be counted, `(B, n_heads, L, head_dim)` each.
    """

    counts: bool = True
    received: mx.array | None = None
    waiting: list[mx.array] = field(default_factory=list)

    def counted(self, received: mx.array | None) -> AttentionCount:
        """Return a count in which entries have received `received`, and no queries wait."""
        return replace(self, received=received, waiting=[])

    def with_queries(self, queries: mx.array) -> AttentionCount:
        """Return a count in which `queries` `(B, n_heads, L, head_dim)` wait after the others."""
        return replace(self, waiting=[*self.waiting, queries])

    def total(
        self, shape: tuple[int, ...], votes: Callable[[mx.array], mx.array]
    ) -> mx.array | None:
        """Return the attention that each entry has received, float32 of `shape`; None if it is unknown.

        Args:
            shape: `(B, n_kv_heads, n)` of the entries.
            votes: returns the attention that queries `(B, n_heads, L, head_dim)` give each entry, of `shape`.
        """
        if not self.counts and self.received is None:
            return None
        received = mx.zeros((*shape[:2], 0)) if self.received is None else self.received
        n_new = shape[2] - received.shape[2]  # entries that have received nothing yet
        total = mx.pad(received, [(0, 0), (0, 0), (0, n_new)])
        if self.waiting:
            total = total + votes(mx.concatenate(self.waiting, axis=2))
        return total

    @property
    def arrays(self) -> list[mx.array]:
        """Return the arrays that are evaluated between two tokens."""
        received = [] if self.received is None else [self.received]
        return [*self.waiting, *received]
