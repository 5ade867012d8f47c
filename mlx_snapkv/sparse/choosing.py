"""What an attention module and its function are given where a call's own queries choose the entries it reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import Any

import mlx.core as mx

from ..entries.queries import Captured, OnQueries


class Choosing(OnQueries, ABC):
    """A cache of which a call's queries choose what the call reads; tokens that come together choose together.

    A call of an attention module goes so:

    1. `update_and_fetch` adds its keys and values (`move`, `add`) and gives zeros for the `size()` entries to be read.
    2. `record` gets its queries, which make the `choice`.
    3. `attended` gives the attention function what they chose, instead of the zeros.
    4. Where that can't be (the module computes with the entries before it calls the function, or other layers read
       them, too), `asks_again` is true: the module is called once more, and `update_and_fetch` gives what was chosen.
    """

    observes = chooses = True
    layer: Any
    _n_new = 0
    _zeros: Any = None  # what the attention module was given
    _chosen: Any = None  # what it is to be given
    _seen: Any = ()  # what it was given last

    @abstractmethod
    def move(self, n: int) -> None: ...  # the offset on by `n` tokens

    @abstractmethod
    def add(self, keys: mx.array, values: mx.array) -> None: ...  # entries that are always read

    @abstractmethod
    def size(self) -> int: ...  # entries that a token reads

    @abstractmethod
    def choice(self, captured: Captured) -> tuple[mx.array, mx.array]:
        """What the tokens added last read, chosen by their queries, each KV head's readers together."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add keys and values; zeros, never computed, in an attention module's first call, then what was chosen."""
        self._n_new = keys.shape[2]
        self.move(self._n_new)
        if self._chosen is not None:
            self._seen, self._chosen = self._chosen, None
            return self._seen
        self.add(keys, values)
        shape = (*keys.shape[:2], self.size())
        self._zeros = tuple(
            mx.broadcast_to(_zero(x.dtype), (*shape, x.shape[3])) for x in (keys, values)
        )
        return self._zeros

    def record(self, captured: Captured) -> None:
        """Choose by the queries of the tokens that were added last."""
        if not captured.borrowed and self._zeros is not None:
            queries = captured.read(captured.heads)
            heads = self.layer.family.grouped(queries, self._zeros[0].shape[1])
            self._chosen = self.choice(captured._replace(heads=heads))

    def attended(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """What was chosen, if the attention function was given what the cache gave, and nobody else reads that."""
        given, chosen = self._zeros, self._chosen
        if given is None or chosen is None or keys is not given[0] or values is not given[1]:
            return keys, values
        if self.layer.latent or self.layer.borrowers:
            return keys, values
        self._zeros = self._chosen = None
        return chosen

    def asks_again(self) -> bool:
        """Whether what was chosen is still to be seen; the tokens added last then come once more."""
        if self._chosen is None or self._zeros is None:
            return False
        self.move(-self._n_new)
        self._zeros = None
        return True

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the newest tokens read, for layers that have no entries of their own and borrow these."""
        return self._seen


@lru_cache
def _zero(dtype: mx.Dtype) -> mx.array:
    return mx.array(0, dtype)
