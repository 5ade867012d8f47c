"""Entries and queries brought nearer to each other than their positions are, for a model that can't see as far."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import mlx.core as mx

from ..entries.entries import Entries
from ..entries.queries import Pages, Queries
from ..entries.squeeze import squeezed

if TYPE_CHECKING:
    from .layers import AttentionLayer

PAGES = 4  # in the length
TO_COME = 512  # tokens that are to see gathered entries
AFTER = 64  # positions from a page's end to the first query that is asked of it


@dataclass(frozen=True)
class Pull:
    """How far apart a query and a key may be.

    Tokens go on being counted. What they see is turned forward, by the model's own RoPE, so that distances shrink: the
    consecutive stay so, and gaps are squeezed.

    Attributes:
        length: the largest distance.
        farthest: no key of the cache that this is about is turned to a position before it.
    """

    length: int
    farthest: int = 0

    def after(self, before: Pull | None) -> Pull:
        """The same, for a cache that goes on from the entries of one with `before`."""
        return self if before is None else replace(self, farthest=before.farthest)

    def nearer(
        self, entries: Entries, end: int, to_come: int = TO_COME, closed: bool = False
    ) -> tuple[Entries, Pull]:
        """Entries that are seen from position `end` on, and what is true of them.

        They are as they were if `to_come` tokens can see them so. If not, they are turned to where half of the room
        beside them is left.

        Args:
            closed: turn them in any case, so that no gaps are left.
        """
        if not closed and end + to_come - self.farthest <= self.length:
            return entries, self
        n, old = len(entries), entries.rotations
        if n == 0:
            return entries, replace(self, farthest=end)
        span = 0 if closed else (self.length + n) // 2
        new = squeezed(old, end, span)
        keys = entries.layer.turn(entries.keys, new.astype(mx.int32) - old.astype(mx.int32))
        turned = replace(entries.rekeyed(keys), given_rotations=new)
        return turned.packed(entries.quantization), replace(self, farthest=end - max(n, span))

    def asking(self, observed: Queries, layer: AttentionLayer) -> Queries:
        """The queries, to vote over all entries from the first position on, which come as they were read."""
        size = max(1, self.length // PAGES)
        start = observed.places.start
        far = min(-(-(start - self.length) // size), start // size) * size
        if far <= 0:
            return observed

        @lru_cache(1)
        def asked(page: int) -> mx.array:
            return layer.turned_to(observed.heads, start, (page + 1) * size - 1 + AFTER)

        return replace(observed, pages=Pages(size, far, asked))
