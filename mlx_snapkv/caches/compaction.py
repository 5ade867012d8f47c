"""Position compaction: distances between queries and keys shrink to what a model was trained for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import mlx.core as mx

from ..entries.entries import Entries
from ..entries.queries import Pages, Queries

PAGES_PER_LENGTH = 4
TO_COME = 512  # tokens that are to see gathered entries
AFTER = 64  # positions from a page's end to the first query that is asked of it


@dataclass(frozen=True)
class Compaction:
    """How far apart a query and a key may be.

    Keys are turned forward, by the model's own RoPE, so that gaps between them shrink; positions stay.
    """

    length: int  # the largest distance
    farthest: int = 0  # no key of the cache that this is about is turned to a position before it

    def after(self, before: Compaction | None) -> Compaction:
        """The same, for a cache that goes on from the entries of one with `before`."""
        return self if before is None else replace(self, farthest=before.farthest)

    def nearer(
        self, entries: Entries, end: int, to_come: int = TO_COME, closed: bool = False
    ) -> tuple[Entries, Compaction]:
        """Entries as they are seen from position `end` on, and the compaction of the cache that is to hold them.

        They stay if `to_come` tokens can see them so. If not, they are turned to where half of the room beside them is
        left; if `closed`, so that no gaps are left in any case.
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

    def asking(self, observed: Queries, layer: Any) -> Queries:
        """The queries, to vote over all entries from the first position on, which come as they were read."""
        start = observed.places.start
        size, far = self._pages(start)
        if far <= 0:
            return observed

        @lru_cache(1)
        def asked(page: int) -> mx.array:
            return layer.turned_to(observed.heads, start, (page + 1) * size - 1 + AFTER)

        return replace(observed, pages=Pages(size, far, asked))

    def seen_from(self, entries: Entries, start: int) -> Entries:
        """Entries as they were read, turned to where queries from `start` on vote for them."""
        if not self.is_far(start) or not len(entries):
            return entries
        return entries.rekeyed(self.turned(entries.keys, entries.positions, start, entries.layer))

    def turned(self, keys: mx.array, positions: mx.array, start: int, layer: Any) -> mx.array:
        """The same of keys `(B, n_kv_heads, n, head_dim)` alone."""
        size, far = self._pages(start)
        if far <= 0:
            return keys
        places = positions.astype(mx.int32)
        before = AFTER + size - 1 - places % size
        return layer.turn(keys, mx.where(places < far, start - before - places, 0))

    def lined_up(self, entries: Entries, start: int, end: int) -> Entries:
        """Entries in order of position, as queries from `start` on read them: where some are too far away, turned to
        the places before `end`, without gaps."""
        if not self.is_far(start) or not len(entries):
            return entries
        new = end - len(entries) + mx.arange(len(entries), dtype=mx.int32)
        steps = new - entries.positions.astype(mx.int32)
        return entries.rekeyed(entries.layer.turn(entries.keys, steps))

    def is_far(self, start: int) -> bool:
        """Whether some entries are too far away for queries from `start` on."""
        return self._pages(start)[1] > 0

    def _pages(self, start: int) -> tuple[int, int]:
        """Entries of a page, and how many entries lie in pages that are too far from `start`."""
        size = max(1, self.length // PAGES_PER_LENGTH)
        return size, min(-(-(start - self.length) // size), start // size) * size


def squeezed(positions: mx.array, end: int, span: int) -> mx.array:
    """Positions moved forward so that all are within `span` before `end`.

    Every step from one of the ascending `(B, n_kv_heads, n)` to the next, and from the last one to `end`, is cut down
    to the largest length that fits, 1 at least: uint32, the last `n` before `end` if there are more than `span`.
    """
    n = positions.shape[2]
    last = mx.full((*positions.shape[:2], 1), end, mx.int32)
    steps = mx.diff(mx.concatenate([positions.astype(mx.int32), last], axis=2), axis=2)
    # If the shortest are k and sum up to s, the others may be (span - s) / (n - k) long, for one of these k.
    shortest = mx.sort(steps, axis=2)
    sums = mx.cumsum(shortest, axis=2)
    others = n - mx.arange(n, dtype=mx.int32)
    longest = ((span - (sums - shortest)) // others).max(axis=2, keepdims=True)
    cut = mx.minimum(steps, mx.maximum(longest, 1))
    steps = mx.where(sums[..., -1:] <= span, steps, cut)
    return (end - mx.cumsum(steps, axis=2, reverse=True)).astype(mx.uint32)


def looked_up(positions: mx.array, known: mx.array, found: mx.array) -> mx.array:
    """Positions `(B, n_kv_heads, m)`, with `found` in the place of those that are among the ascending `known`."""
    n = known.shape[2]
    # Sorted together, every one comes behind the last of the known that is not above it.
    order = mx.argsort(mx.concatenate([2 * known, 2 * positions + 1], axis=2), axis=2)
    n_before = mx.cumsum((order < n).astype(mx.int32), axis=2)
    place = mx.take_along_axis(n_before, mx.argsort(order, axis=2)[..., n:], axis=2) - 1
    place = mx.maximum(place, 0)
    same = mx.take_along_axis(known, place, axis=2) == positions
    return mx.where(same, mx.take_along_axis(found, place, axis=2), positions)
