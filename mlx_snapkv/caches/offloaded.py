"""A KV cache whose rows rest in a store between the turns of a conversation."""

from __future__ import annotations

import copy

import mlx.core as mx
from mlx_lm.models.cache import KVCache, _BaseCache, create_attention_mask

from ..entries.queries import Recorder
from .stores import RowStore


class RestingKVCache(Recorder, _BaseCache):
    """A KV cache of all tokens: those of earlier turns in a store, those of this turn plain in memory.

    The store's rows are read anew by every attention that needs them, a layer at a time, so that never more than one
    layer's are in memory. While the store is empty this is an ordinary `KVCache`.

    Attributes:
        store: where rows rest.
        fresh: the rows since the last `rest`.
    """

    def __init__(self, store: RowStore):
        super().__init__(0, 0)
        self.store = store
        self.fresh = KVCache()

    @property
    def offset(self) -> int:  # type: ignore[override]
        """Tokens held."""
        return self.store.n_rows + self.fresh.offset

    def observe(self, first: int, last: int, capacity: int) -> None:
        """Keep the queries of other positions, `capacity` tokens in all; those kept so far are forgotten."""
        self.start_recording(first, last)
        self.fresh.step = max(KVCache.step, capacity - self.offset)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add `(B, n_kv_heads, L, head_dim)` keys and values; all there are."""
        if self.store.n_rows:
            mx.eval(keys, values)  # and with them the layer before, whose rows can then go
        self.fresh.update_and_fetch(keys, values)
        return self.keys_and_values() if self.store.n_rows == 0 else self.computed()

    def computed(self) -> tuple[mx.array, mx.array]:
        """`keys_and_values`, computed one after the other, which needs less memory than both at once."""
        keys, values = self.keys_and_values()
        mx.eval(keys)
        mx.eval(values)
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """All keys and values, `(B, n_kv_heads, offset, head_dim)` each."""
        if self.store.n_rows == 0:
            return self.fresh.keys_and_values()
        rows = self.store.rows()
        if self.fresh.offset == 0:
            return rows
        fresh = self.fresh.keys_and_values()
        keys, values = (mx.concatenate([old, new], axis=2) for old, new in zip(rows, fresh))
        return keys, values

    def rest(self) -> None:
        """Put the fresh rows into the store.

        Raises:
            SnapKVError: it has no room for them; they stay in memory then.
        """
        if self.fresh.offset:
            self.store.append(*self.fresh.keys_and_values())
            self.fresh = KVCache()

    def mark(self) -> tuple[int, KVCache]:
        """Where the cache is now, for `back_to`."""
        return self.store.n_rows, copy.copy(self.fresh) if self.fresh.offset else KVCache()

    def back_to(self, mark: tuple[int, KVCache]) -> None:
        """Take back what was fed since `mark`, whether it rests or not."""
        n_rows, fresh = mark
        self.store.truncate(n_rows)
        self.fresh = fresh

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """The mask of the next update of `N` tokens, as mlx-lm's `KVCache` makes it."""
        return create_attention_mask(N, self.offset, return_array, window_size)

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.offset == 0

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Take back the newest `n` tokens, exactly; how many those were."""
        n = min(self.offset, n)
        self.store.truncate(self.store.n_rows - (n - self.fresh.trim(n)))
        return n

    @property
    def nbytes(self) -> int:
        """Bytes in memory between turns."""
        return self.store.nbytes + self.fresh.offset * self._fresh_row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's keys and values as the attention reads them."""
        return self.store.row_bytes or self._fresh_row_bytes

    @property
    def _fresh_row_bytes(self) -> int:
        if self.fresh.empty():
            return 0
        return sum(rows[:, :, :1].nbytes for rows in self.fresh.keys_and_values())

    @property  # type: ignore[misc]  # nothing sets the state of a conversation under way
    def state(self):
        # mlx-lm's prefill loop evaluates the state, and with it the queries and their statistics.
        return self.fresh.keys, self.fresh.values, self._queries, self._sums
