"""What an attention module and its function are given where a call's own queries choose the entries it reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from ..entries.attention import HIDDEN
from ..entries.queries import Captured, OnQueries


class Choosing(OnQueries, ABC):
    """What an attention module and its function are given where a call's queries choose the entries.

    The attention module is given zeros. Its queries choose, and the attention function sees what they chose; where a
    module computes with the entries before it calls that function, it is called a second time. Tokens that come
    together choose together.
    """

    observes = chooses = True
    layer: Any
    _n_new = 0
    _zeros: Any = None  # what the attention module was given
    _chosen: Any = None  # what it is to be given
    _seen: Any = ()  # what it was given last
    bias: mx.array | None = None  # of the first entries' logits; see `Rest.bias`

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
        self.bias = None
        self.add(keys, values)
        shape = (*keys.shape[:2], self.size())
        self._zeros = tuple(mx.zeros((*shape, x.shape[3]), x.dtype) for x in (keys, values))
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


def biased(bias: mx.array, n: int, dtype: mx.Dtype, mask: Any = None) -> mx.array:
    """An additive mask `(B, n_heads, L, n)` for entries the first of which have a `bias` `(B, n_heads, L, n_pages)`.

    Args:
        dtype: of the mask. Of float16 the bias is at most its largest number: infinity would make the output NaN.
        mask: None, "causal", aligned with the last entry, or a bool one `(..., L, n)`.
    """
    B, H, L, n_pages = bias.shape
    if dtype == mx.float16:
        bias = mx.minimum(bias, mx.finfo(dtype).max)
    if isinstance(mask, str):
        mask = create_causal_mask(L, n - L)
    if mask is None:
        return mx.pad(bias, [(0, 0)] * 3 + [(0, n - n_pages)]).astype(dtype)
    others = mx.where(mask[..., n_pages:], mx.zeros((B, H, L, n - n_pages)), HIDDEN)
    return mx.concatenate([bias, others], axis=-1).astype(dtype)
