"""The full view: all entries of a layer, wherever they are, while an answer is decoded from a few."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..entries.entries import Entries
from ..entries.spans import spans
from .held_rows import MakeAside
from .index import MAX_SAMPLED_KEYS, KeyIndex, ranks_by_index
from .stores import EntryView, JoinedView

SAMPLED_PLACES = 16  # places all over the text, whose keys' spread it is made for


class FullView(Entries):
    """All entries of a layer, which are read a block at a time."""

    def __init__(
        self,
        views: Sequence[EntryView],  # they stay as they are, in order of position
        layer: Any,
    ):
        super().__init__(None, None, layer=layer)
        self._entries = JoinedView(views)
        self.index: KeyIndex | None = None  # finds the likeliest entries, unless they are few

    def __len__(self) -> int:
        return self._entries.n_entries

    def followed_by(self, view: EntryView) -> FullView:
        """Return these entries and then those of `view`, without an index."""
        return FullView([self._entries, view], self.layer)

    def gather(self, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Return the keys and values, plain, of the entries at uint32 `positions` `(B, n_kv_heads, n)`."""
        keys, values = self._entries.gather(positions)
        return keys, values

    def make_index(self, queries: mx.array | None) -> KeyIndex | None:
        """An index of all keys, for queries like these `(B, n_heads, n, head_dim)`, their readers in turn; None if the
        keys are few."""
        n = len(self)
        if not ranks_by_index(n):
            return None
        length = MAX_SAMPLED_KEYS // SAMPLED_PLACES
        starts = range(0, n, math.ceil(n / SAMPLED_PLACES))
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
