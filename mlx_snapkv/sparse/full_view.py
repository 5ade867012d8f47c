"""A view of all of a layer's entries, in memory or in files."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from ..entries.entries import Entries
from ..entries.spans import spans
from .growing_rows import MakeSpill
from .index import MAX_SAMPLED_KEYS, KeyIndex, ranks_by_index
from .stores import EntryView, JoinedView

KEYS_QUANTISED_AT_ONCE = 4096  # limits the memory for float32 copies of keys
# Number of evenly spaced places in the text where keys are sampled for an index.
SAMPLED_PLACES = 16


class FullView(Entries):
    """All of a layer's entries, read one block at a time.

    Args:
        views: views of successive entries, in order of position.
        layer: the `AttentionLayer` that the entries belong to.

    Attributes:
        index: index that ranks the entries, or None to rank them by exact attention.
    """

    def __init__(
        self,
        views: Sequence[EntryView],
        layer: Any,
    ):
        """Join the views without reading any entries."""
        super().__init__(None, None, layer=layer)
        self._joined_view = JoinedView(views)
        self.index: KeyIndex | None = None

    def __len__(self) -> int:
        """Return the number of entries.

        The entries of a view passed to `followed_by` don't count until `extend` adds them.
        """
        return self._joined_view.n_entries

    def followed_by(self, view: EntryView) -> FullView:
        """Return a copy of this view to which `extend` can add entries of `view`, which come after this view's own.

        The copy starts with the current entries and a copy of the index.
        """
        these_entries = JoinedView([self._joined_view])
        these_entries.limit = len(self)  # because the stores may grow
        longer_view = FullView([these_entries, view], self.layer)
        longer_view._joined_view.limit = len(self)  # `extend` increases the limit
        longer_view.index = copy.deepcopy(self.index)
        return longer_view

    def extend(self, n: int) -> None:
        """Extend the view up to position `n`, and index the new keys if there is an index."""
        self._joined_view.limit = n
        if self.index is not None:
            self._add_missing_keys(self.index)

    @property
    def buffers(self) -> tuple[mx.array, mx.array] | None:
        """Return the whole buffers of keys and values, or None if they are quantised, in files or in several stores."""
        return self._joined_view.buffers

    def gather(self, positions: mx.array) -> tuple[mx.array, mx.array]:
        """Return the dequantised keys and values at uint32 `positions` `(B, n_kv_heads, n)`."""
        keys, values = self._joined_view.gather(positions)
        return keys, values

    def make_index(self, queries: mx.array | None) -> KeyIndex | None:
        """Index all keys. Return None if there are too few keys for an index.

        Args:
            queries: sample of queries that sets the channel weights, `(B, n_heads, n, head_dim)`. If several layers
                read the entries, it has the query heads of all these layers. None gives all channels the weight 1.
        """
        n_keys = len(self)
        if not ranks_by_index(n_keys):
            return None
        keys_per_place = MAX_SAMPLED_KEYS // SAMPLED_PLACES
        samples: list[mx.array] = []  # one for each place
        for start in range(0, n_keys, math.ceil(n_keys / SAMPLED_PLACES)):
            samples.append(self.read_keys(start, min(start + keys_per_place, n_keys)))
        sampled_keys = mx.concatenate(samples, axis=2)
        grouped_queries = None
        if queries is not None:
            grouped_queries = self.layer.group_heads(queries, sampled_keys.shape[1])
        index = KeyIndex(sampled_keys, grouped_queries, self.make_spill)
        index.n_keys_at_sampling = n_keys
        return self._add_missing_keys(index)

    def extend_index(self, index: KeyIndex | None, queries: mx.array | None) -> KeyIndex | None:
        """Add missing keys to `index`, or build a new index if `index` is None or outgrown.

        Return None if there are too few keys for an index.
        """
        n_keys = len(self)
        if index is None or not ranks_by_index(n_keys) or index.is_outgrown_by(n_keys):
            return self.make_index(queries)
        return self._add_missing_keys(index)

    def _add_missing_keys(self, index: KeyIndex) -> KeyIndex:
        """Add missing keys to `index`, and return it."""
        index.codes.reserve(len(self))
        for span in spans(len(index), len(self), KEYS_QUANTISED_AT_ONCE):
            index.append(self.read_keys(*span))
        return index

    def _read(self, which: int, start: int, stop: int, after: Sequence[mx.array] = ()) -> mx.array:
        keys_or_values = self._joined_view.read(which, start, stop)
        return mx.depends(keys_or_values, list(after)) if after else keys_or_values

    def keys_of_heads(self, kv_heads: slice, after: Sequence[mx.array] = ()) -> mx.array:
        """Return all keys of the given KV heads, `(B, n, T, head_dim)`. The arrays `after` are evaluated first."""

        def read_block(start: int, stop: int, previous_block: list[mx.array]) -> mx.array:
            return self.read_keys(start, stop, after=previous_block or after)

        keys = self.map_blocks(read_block, spans(0, len(self)))
        return keys[:, kv_heads]

    @property
    def reads_allocate(self) -> bool:  # type: ignore[override]
        """Return whether reads allocate memory. If they do, evaluate each block before reading the next."""
        return self._joined_view.reads_allocate

    @property
    def make_spill(self) -> MakeSpill | None:
        """Return the function that creates a spill file, or None if all entries are in memory."""
        return self._joined_view.make_spill
