"""The base of caches whose entries are chosen by the queries of the same attention call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any

import mlx.core as mx

from ..entries.queries import Captured, OnQueries


class ChoosingCache(OnQueries, ABC):
    """A cache that asks a call's queries which entries the call reads. Tokens of one call choose together.

    An attention module fetches entries before its queries are known, so a call takes four steps:

    1. `update_and_fetch` adds keys and values (`move`, `add`) and returns zeros in place of the `size()` entries.
    2. `record` receives the queries and calls `choice`.
    3. `attended` gives the attention function the chosen entries instead of the zeros.
    4. If step 3 is impossible (the module computes with the entries before it calls the function, or other layers
       read them), `asks_again` returns true: the module is called again, and `update_and_fetch` returns the chosen
       entries.
    """

    observes = chooses = True
    layer: Any
    offset: Any
    _n_new = 0
    _zeros: Any = None  # placeholder keys and values that the attention module received
    _chosen: Any = None  # chosen keys and values that no attention function has received yet
    _last_read: Any = ()  # keys and values of the last call that fetched chosen entries

    def move(self, n: int) -> None:
        """Advance the offset by `n` tokens."""
        self.offset += n

    @abstractmethod
    def add(self, keys: mx.array, values: mx.array) -> None:
        """Append keys and values `(B, n_kv_heads, L, head_dim)` of new tokens."""

    @abstractmethod
    def size(self) -> int:
        """Return the number of entries that the newest tokens read."""

    @abstractmethod
    def choice(self, captured: Captured) -> tuple[mx.array, mx.array]:
        """Return the keys and values that the newest tokens read, chosen by their queries.

        Args:
            captured: its heads are grouped: query heads that share a KV head are neighbours.
        """

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add keys and values and return zeros, which are never computed; return chosen entries in a second call."""
        self._n_new = keys.shape[2]
        self.move(self._n_new)
        if self._chosen is not None:
            self._last_read, self._chosen = self._chosen, None
            return self._last_read
        self.add(keys, values)
        shape = (*keys.shape[:2], self.size())
        self._zeros = tuple(
            mx.broadcast_to(_zero(x.dtype), (*shape, x.shape[3])) for x in (keys, values)
        )
        return self._zeros

    def record(self, captured: Captured) -> None:
        """Let the queries of the newest tokens choose."""
        if not captured.borrowed and self._zeros is not None:
            queries = captured.read(captured.heads)
            heads = self.layer.family.grouped(queries, self._zeros[0].shape[1])
            self._chosen = self.choice(captured._replace(heads=heads))

    def attended(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Return the chosen entries in place of the zeros; other keys and values are returned as they are."""
        zeros, chosen = self._zeros, self._chosen
        if zeros is None or chosen is None or keys is not zeros[0] or values is not zeros[1]:
            return keys, values
        if self.layer.latent or self.layer.borrowers:
            return keys, values
        self._zeros = self._chosen = None
        return chosen

    def asks_again(self) -> bool:
        """Return whether the attention module must be called again with the same tokens, and step back if so."""
        if self._chosen is None or self._zeros is None:
            return False
        self.move(-self._n_new)
        self._zeros = None
        return True

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the entries that the newest tokens read, for layers that borrow them."""
        return self._last_read


@lru_cache
def _zero(dtype: mx.Dtype) -> mx.array:
    return mx.array(0, dtype)
