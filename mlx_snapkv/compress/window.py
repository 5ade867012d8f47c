"""The cache for decoding after a compressed prompt: pinned entries and a window of recent tokens."""

from typing import Any

import mlx.core as mx
import numpy as np

from ..caches.contract import loadable
from ..entries.entries import Entries
from ..entries.quantization import (
    Quantization,
    Stored,
    count_rows,
    map_arrays,
    rows_to_allocate,
    slice_rows,
    with_new_rows,
    write_rows,
)
from ..entries.quota import UNLIMITED
from ..errors import SnapKVError
from .evicting import EvictingCache

# If pending entries (see `SnapKVCache`) need rows after the window, allocate at least this many.
SLACK = 16


@loadable
class SnapKVCache(EvictingCache):
    """A KV cache with pinned entries and a recent window that either grows with the answer or slides over it.

        [0 : n_pin)            pinned entries, kept from the prompt and never overwritten
        [n_pin : capacity)     recent window, a ring buffer: once full, each decoded token overwrites the oldest entry
        [capacity : )          pending entries, from updates of several tokens

    A growing window never fills up, and appending costs the same as in mlx-lm's `KVCache`. A sliding window keeps the
    cache's shape constant while an answer is decoded.

    Keys keep their original RoPE rotation, and `offset` is the next token's position in the text. One update of `L`
    tokens is equivalent to `L` updates of one token: `make_mask` hides the entries that earlier tokens of the same
    update would have overwritten. Pending entries move into the window before the next update.

    Args:
        keys: keys in order of position, `(B, n_kv_heads, n_pin + n, head_dim)` with `n <= n_window`, or the arrays of
            quantised keys.
        values: values in the same format.
        positions: original positions of the pinned entries, uint32 `(B, n_kv_heads, n_pin)`.
        offset: position of the next token. The window holds the `n` tokens before it.
        n_window: maximum number of entries in the window, at least 1. None lets it grow.
        quantization: how these and all later entries are quantised, or None if they are not.

    Attributes:
        is_drafted: whether the cache is used in mlx-lm's speculative decoding, which trims rejected drafts.

    Raises: SnapKVError: the shapes disagree, there are more entries than `offset` or the window allows, or `n_window <
        1`.
    """

    SAVED_NUMBERS = (*EvictingCache.SAVED_NUMBERS, "n_pin", "n_window", "_oldest")

    is_drafted = False

    def __init__(
        self,
        keys: Stored,
        values: Stored,
        positions: mx.array,
        *,
        offset: int,
        n_window: int | None,
        quantization: Quantization | None = None,
    ):
        """Use the arrays as buffers without copying them."""
        n_window = UNLIMITED if n_window is None else n_window
        n_pin = positions.shape[-1]
        n_keys, n_values = count_rows(keys), count_rows(values)
        max_entries = min(offset, n_pin + n_window)
        is_consistent = n_window >= 1 and n_keys == n_values and n_pin <= n_keys <= max_entries
        if not is_consistent:
            raise SnapKVError(
                f"{n_keys} keys and {n_values} values of {offset} tokens don't hold {n_pin} pinned entries "
                f"and a window of at most {n_window}, at least 1"
            )
        super().__init__(newest=0)
        self.keys, self.values = keys, values
        self.quantization = quantization
        self.offset = offset
        self.n_pin = n_pin
        self.n_window = n_window
        self._pinned_positions = positions.astype(mx.uint32)
        self._n_entries = n_keys
        self._oldest = 0  # ring pointer: row n_pin + _oldest has the window's oldest entry

    def _saved_arrays(self) -> dict[str, Any]:
        """Return the attributes to save as arrays, by name."""
        return super()._saved_arrays() | {"pinned": self._pinned_positions}

    def _restore(self, numbers: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Restore the saved attributes."""
        super()._restore(numbers, arrays)
        self._pinned_positions = arrays["pinned"]

    def append(self, keys: Stored, values: Stored) -> None:
        """Append stored keys and values. In a full ring, a single token overwrites the oldest entry."""
        L = count_rows(keys)
        self._move_pending_entries()
        self._free_unneeded_rows(L)
        overwrites_oldest = L == 1 and self._n_entries == self.capacity
        if overwrites_oldest:
            first_row = self.claim_row()  # also counts the token
        else:
            first_row = self._n_entries
            self._n_entries += L
            self.offset += L
            self._enlarge_buffers()
        write_rows((self.keys, self.values), first_row, (keys, values))

    def _enlarge_buffers(self) -> None:
        """Enlarge the buffers if necessary. A sliding window is allocated in full."""
        n_allocated = count_rows(self.keys)
        if self.grows:
            has_room = self._n_entries <= n_allocated
            n_needed = n_allocated if has_room else rows_to_allocate(self._n_entries)
        elif self._n_entries <= self.capacity:
            n_needed = self.capacity
        else:
            n_needed = max(self._n_entries, self.capacity + SLACK)
        if n_needed > n_allocated:
            n_new = n_needed - n_allocated
            self.keys, self.values = with_new_rows((self.keys, self.values), n_new)

    def claim_row(self) -> int:
        """Count a new token, and return the row where the caller must write the token's entry."""
        if self._n_entries < self.capacity:
            row = self._n_entries
            self._n_entries += 1
        else:
            row = self.n_pin + self._oldest
            self._oldest = (self._oldest + 1) % self.n_window
        self.offset += 1
        return row

    @property
    def grows(self) -> bool:  # type: ignore[override]
        """Return whether the window is unlimited, so that no entry is overwritten."""
        return self.n_window >= UNLIMITED

    @property
    def capacity(self) -> int:
        """Return the number of rows for the pinned entries and a full window."""
        return self.n_pin + self.n_window

    @property
    def n_after_next(self) -> int:
        """Return the number of entries after one more token."""
        return min(self._n_entries + 1, self.capacity)

    def _free_unneeded_rows(self, L: int) -> None:
        """Free the rows after the window if there are more than an update of `L` tokens needs."""
        n_needed = self.capacity + max(SLACK, L)
        if count_rows(self.keys) > n_needed:
            rows_to_keep = slice_rows((self.keys, self.values), 0, self.capacity)
            self.keys, self.values = map_arrays(mx.contiguous, rows_to_keep)

    def compact(self) -> None:
        """Prepare for `claim_row`: move pending entries into the window, and free unneeded rows."""
        self._move_pending_entries()
        self._free_unneeded_rows(1)

    def _move_pending_entries(self) -> None:
        """Move the pending entries into the ring, overwriting its oldest entries."""
        n_pending = self._n_entries - self.capacity
        if n_pending <= 0:
            return
        self._oldest = (self._oldest + n_pending) % self.n_window
        n_moved = min(n_pending, self.n_window)
        first_moved = self._n_entries - n_moved
        newest_entries = slice_rows((self.keys, self.values), first_moved, self._n_entries)
        # The newest entries of a full ring come just before the oldest one.
        ring_indices = mx.arange(self._oldest - n_moved, self._oldest) % self.n_window
        write_rows((self.keys, self.values), self.n_pin + ring_indices, newest_entries)
        self._n_entries = self.capacity

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """Return the mask for the next `N` tokens: None, `"causal"`, or the bool mask from `visibility_mask`."""
        if window_size is not None:
            raise SnapKVError("a layer with sliding-window attention can't use a compressed cache")
        # The next update starts by moving pending entries into the ring, so treat them as moved.
        n_pending = max(0, self._n_entries - self.capacity)
        n_in_window = self._n_entries - self.n_pin - n_pending
        oldest = (self._oldest + n_pending) % self.n_window
        overwrites_nothing = n_in_window + N <= self.n_window
        is_window_full = n_in_window == self.n_window
        # A single token needs no mask if the window is full, because it overwrites the oldest entry before it attends.
        if N == 1 and (overwrites_nothing or is_window_full):
            return None
        if overwrites_nothing and not return_array:
            return "causal"
        return visibility_mask(self.n_pin, n_in_window, self.n_window, N, oldest)

    def is_trimmable(self) -> bool:
        """Return True only for a growing window in speculative decoding.

        Trimming such a window is safe, because in speculative decoding mlx-lm never trims more tokens than it has just
        appended.
        """
        return self.is_drafted and self.grows

    def trim(self, n: int) -> int:  # type: ignore[override]
        """Drop the `n` newest tokens of a growing window, or all if there are fewer. Return the number dropped."""
        n = min(n, self._n_entries - self.n_pin)
        self._n_entries -= n
        self.offset -= n
        return n

    @property
    def positions(self) -> mx.array:  # type: ignore[override]
        """Return the original position of each row's entry, uint32 `(B, n_kv_heads, size())`."""
        n_recent = self._n_entries - self.n_pin
        n_ring = min(n_recent, self.n_window)
        # The rank of each recent row in order of position, from 0 for the oldest entry.
        ring_ranks = (mx.arange(n_ring) - self._oldest) % max(n_ring, 1)
        ranks = mx.concatenate([ring_ranks, mx.arange(n_ring, n_recent)])
        recent_start = self.offset - n_recent
        recent_positions = (ranks + recent_start).astype(mx.uint32)
        B, H, _ = self._pinned_positions.shape
        recent_positions = mx.broadcast_to(recent_positions, (B, H, n_recent))
        return mx.concatenate([self._pinned_positions, recent_positions], axis=-1)

    def held(self) -> Entries:
        """Return the entries in order of position, without voters: this cache keeps no queries."""
        entries_by_row = self._entries_in_row_order()
        rows_by_position = mx.argsort(entries_by_row.positions, axis=-1)
        return entries_by_row.take(rows_by_position)


def visibility_mask(n_pin: int, n_recent: int, n_window: int, N: int, oldest: int) -> mx.array:
    """Return which rows each of `N` new tokens sees, bool `(N, n_pin + n_recent + N)`.

    The recent entries are numbered from 0 in order of position, and the new tokens' entries from `n_recent`. New token
    `i` sees the pinned entries, and the `n_window` entries up to and including its own, which have the numbers
    `(n_recent + i - n_window, n_recent + i]`.

    Args:
        n_pin: number of pinned entries, in the first rows.
        n_recent: number of recent entries, in the rows after the pinned ones. The first `n_window` of them form a ring,
            and the rest are in order.
        n_window: number of recent entries that a token sees, including its own.
        N: number of new tokens.
        oldest: index of the ring's oldest entry.
    """
    # Number the rows. Pinned entries get negative numbers, and the ring's numbers are rotated.
    numbers = np.arange(-n_pin, n_recent + N)
    n_ring = min(n_recent, n_window)
    ring = slice(n_pin, n_pin + n_ring)
    numbers[ring] = (numbers[ring] - oldest) % max(n_ring, 1)
    is_pinned = numbers < 0
    own_numbers = n_recent + np.arange(N)[:, None]
    is_in_window = (own_numbers - n_window < numbers) & (numbers <= own_numbers)
    return mx.array(is_pinned | is_in_window)
