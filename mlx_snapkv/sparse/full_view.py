"""All entries of a layer, in memory or in files, from which an answer reads a few."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..entries.entries import Entries
from ..entries.spans import spans
from .held_rows import MakeAside
from .index import MAX_SAMPLED_KEYS, KeyIndex, ranks_by_index
from .stores import EntryView, JoinedView

KEYS_QUANTISED_AT_ONCE = 4096  # limits the float32 copies of keys
SAMPLED_PLACES = 16  # evenly spaced places of the text whose keys an index is made from


class FullView(Entries):
    """All entries of a layer, which are read a block at a time.

    Args:
        views: parts of the entries in order of position.
        layer: the model's `AttentionLayer` that the entries belong to.

    Attributes:
        index: ranks the entries; None ranks them by their exact votes.
    """

    def __init__(
        self,
        views: Sequence[EntryView],
        layer: Any,
    ):
        """Join the views without reading entries."""
        super().__init__(None, None, layer=layer)
        self._entries = JoinedView(views)
        self.index: KeyIndex | None = None

    def __len__(self) -> int:
        """Return the number of entries in all views."""
        return self._entries.n_entries

    def followed_by(self, view: EntryView) -> FullView:
        """Return a view of these entries with a copy of their index, which `extend` extends by entries of `view`."""
        entries = JoinedView([self._entries])
        entries.limit = len(self)  # the store may get more entries
        longer = FullView([entries, view], self.layer)
        longer._entries.limit = len(self)
        longer.index = copy.deepcopy(self.index)
        return longer

    def extend(self, n: int) -> None:
        """Include the entries up to position `n`, and append their keys to the index."""
        self._entries.limit = n
        if self.index is not None:
            self._completed(self.index)

    @property
    def buffers(self) -> tuple[mx.array, mx.array] | None:
        """Return the whole buffers `(B, n_kv_heads, capacity, head_dim)` of plain entries in memory, or None."""
        return self._entries.buffers

    def gather(self, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Return the keys and values, plain, of the entries at uint32 `positions` `(B, n_kv_heads, n)`."""
        keys, values = self._entries.gather(positions)
        return keys, values

    def make_index(self, queries: mx.array | None) -> KeyIndex | None:
        """Return a new index of all keys; None if the keys are too few for an index.

        Args:
            queries: a sample of the queries that will search it, `(B, n_heads, n, head_dim)`, heads of all readers in
                turn; None weighs all channels alike.
        """
        n = len(self)
        if not ranks_by_index(n):
            return None
        length = MAX_SAMPLED_KEYS // SAMPLED_PLACES
        starts = range(0, n, math.ceil(n / SAMPLED_PLACES))
        sample = [self.read_keys(start, min(start + length, n)) for start in starts]
        keys = mx.concatenate(sample, axis=2)
        heads = None if queries is None else self.layer.grouped(queries, keys.shape[1])
        index = KeyIndex(keys, heads, self.aside)
        index.n_sampled_from = n
        return self._completed(index)

    def grown_index(self, index: KeyIndex | None, queries: mx.array | None) -> KeyIndex | None:
        """Append the missing keys to an index and return it; return a new index if the keys have outgrown it."""
        n = len(self)
        if index is None or not ranks_by_index(n) or index.is_outgrown_by(n):
            return self.make_index(queries)
        return self._completed(index)

    def _completed(self, index: KeyIndex) -> KeyIndex:
        """Append the keys that the index lacks, and return it."""
        index.reserve(len(self))
        for span in spans(len(index), len(self), KEYS_QUANTISED_AT_ONCE):
            index.append(self.read_keys(*span))
        return index

    def _read(self, which: int, start: int, stop: int, after: Sequence[mx.array] = ()) -> mx.array:
        part = self._entries.read(which, start, stop)
        return mx.depends(part, list(after)) if after else part

    def keys_of_heads(self, heads: slice, after: Sequence[mx.array] = ()) -> mx.array:
        """Return the keys of some KV heads, `(B, n, T, head_dim)`, computed after `after`."""
        keys = self.by_block(
            lambda start, stop, earlier: self.read_keys(start, stop, earlier or after),
            spans(0, len(self)),
        )
        return keys[:, heads]

    @property
    def waits(self) -> bool:  # type: ignore[override]
        """Return whether reading a view allocates memory, so that each block must be used before the next."""
        return self._entries.waits

    @property
    def aside(self) -> MakeAside | None:
        """Return the function that makes a file for rows beside the entries; None if the entries are in memory."""
        return self._entries.aside
