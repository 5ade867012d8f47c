"""The full view: all entries of a layer, wherever they are, while an answer is decoded from a few."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..entries.attention import latest_votes
from ..entries.entries import Entries
from ..entries.held_rows import MakeAside
from ..entries.key_index import CANDIDATES, SAMPLE, KeyIndex, ranks_by_index
from ..entries.queries import Queries
from ..entries.spans import spans
from .compaction import Compaction
from .stores import Beginning, EntryView, JoinedView

SAMPLED = 16  # places all over the text, whose keys' spread it is made for
ANY = 1 << 62  # positions that queries and keys may be apart


class FullView(Entries):
    """All entries of a layer, which are read a block at a time."""

    def __init__(
        self,
        views: Sequence[EntryView],  # they stay as they are, in order of position
        layer: Any,
        compaction: Compaction | None = None,  # None leaves distances as they are
        index: KeyIndex | None = None,  # finds the likeliest entries, unless they are few
    ):
        super().__init__(None, None, layer=layer)
        self._compaction = compaction or Compaction(ANY)
        self._entries = JoinedView(views)
        self.index = index if ranks_by_index(len(self)) else None

    def __len__(self) -> int:
        return self._entries.n_entries

    def followed_by(self, view: EntryView) -> FullView:
        """The same entries with others behind them, without an index."""
        return FullView([self._entries, view], self.layer, self._compaction)

    def beginning(self, n: int) -> FullView:
        """The first `n` entries, ranked by the same index."""
        view = FullView([Beginning(self._entries, n)], self.layer, self._compaction)
        view.index = self.index
        return view

    def is_far(self, start: int) -> bool:
        """Whether some entries are too far from queries from `start` on to be read where they are."""
        return self._compaction.is_far(start)

    def voted_by(self, observed: Queries | None) -> Entries:
        """The entries, as a policy scores them."""
        voted = copy.copy(self)
        voted.observed = None if observed is None else self.asked_by(observed)
        return voted

    def asked_by(self, observed: Queries) -> Queries:
        """Queries as they vote over all entries, which come as they were read."""
        return self._compaction.asking(observed, self.layer)

    def gather(self, positions: mx.array) -> Entries:
        """The entries at uint32 `positions` `(B, n_kv_heads, n)`, plain, as they were read."""
        keys, values = self._entries.gather(positions)
        return Entries(keys, values, given_positions=positions, layer=self.layer)

    def seen_from(self, positions: mx.array, start: int) -> Entries:
        """The entries at uint32 `positions` `(B, n_kv_heads, n)`, plain, as queries from `start` on vote for them."""
        return self._compaction.seen_from(self.gather(positions), start)

    def turned(self, keys: mx.array, positions: mx.array, start: int) -> mx.array:
        """Keys `(B, n_kv_heads, n, head_dim)` near these positions, as queries from `start` on vote for them."""
        return self._compaction.turned(keys, positions, start, self.layer)

    def lined_up(self, positions: mx.array, start: int, end: int) -> Entries:
        """The entries at ascending uint32 `positions` `(B, n_kv_heads, n)`, plain; see `Compaction.lined_up`."""
        return self.in_line(self.gather(positions), start, end)

    def in_line(self, entries: Entries, start: int, end: int) -> Entries:
        """Entries in the order in which they are read; see `Compaction.lined_up`."""
        return self._compaction.lined_up(entries, start, end)

    def make_index(self, queries: mx.array | None) -> KeyIndex | None:
        """An index of all keys, for queries like these `(B, n_heads, n, head_dim)`, their readers in turn; None if the
        keys are few."""
        n = len(self)
        if not ranks_by_index(n):
            return None
        length = SAMPLE // SAMPLED
        starts = range(0, n, math.ceil(n / SAMPLED))
        sample = [self.read_keys(start, min(start + length, n)) for start in starts]
        keys = mx.concatenate(sample, axis=2)
        asked = None if queries is None else self.layer.grouped(queries, keys.shape[1])
        index = KeyIndex(keys, asked, self.aside)
        index.n_made_of = n
        return self._completed(index)

    def grown_index(self, index: KeyIndex | None, queries: mx.array | None) -> KeyIndex | None:
        """An index of the first keys with the others added, or what `make_index` makes if it is outgrown or none."""
        n = len(self)
        if index is None or not ranks_by_index(n) or index.outgrown_by(n):
            return self.make_index(queries)
        return self._completed(index)

    def _completed(self, index: KeyIndex) -> KeyIndex:
        """The index with the keys added that it lacks."""
        for span in spans(len(index), len(self)):
            index.append(self.read_keys(*span))
        return index

    def _read(self, which: int, start: int, stop: int, after: Sequence[mx.array] = ()) -> mx.array:
        part = self._entries.read(which, start, stop)
        return mx.depends(part, list(after)) if after else part

    @property
    def waits(self) -> bool:  # type: ignore[override]
        return self._entries.waits

    @property
    def aside(self) -> MakeAside | None:
        """Makes the place for rows that are as many as the entries, if those are in files."""
        return self._entries.aside

    def _votes_of_last(self, *counts: int) -> mx.array:
        index, asked, budget = self.index, self.voters, self.budget or len(self)
        if index is None or len(self) <= CANDIDATES * budget:
            return latest_votes(self.blocks(), asked, counts)

        def keys_at(positions: mx.array) -> mx.array:
            return self.seen_from(positions, asked.places.start).keys

        return index.latest_votes(asked, counts, budget, keys_at)
