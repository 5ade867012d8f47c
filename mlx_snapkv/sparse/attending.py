"""The base class for sparse caches, which compute attention themselves."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import create_attention_mask

from ..caches.contract import LayerCache
from ..entries.attention import HIDDEN_LOGIT
from ..entries.queries import CapturedQueries


class AttendingCache(LayerCache):
    """A cache that lets the newest tokens' queries choose which entries to read.

    An attention module first calls `update_and_fetch` to append the tokens' entries. Then mlx-lm's attention function,
    patched by `models/patch.py`, calls `attend`.
    """

    observes = chooses = True

    @abstractmethod
    def choose(
        self, captured: CapturedQueries, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array, mx.array | None]:
        """Choose the keys and values that the newest tokens read.

        Args:
            captured: the newest tokens' queries. The tokens' entries are already in the cache.
            keys: keys returned by `update_and_fetch`.
            values: values returned by `update_and_fetch`.

        Returns: keys, values, and the bias of the cluster means' logits, `(B, n_heads, L, n_means)`. Cluster means (see
            `residual.py`) come before entries. If there are no means, the bias is None.
        """

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Compute the newest tokens' attention to the entries that `choose` returns.

        Args:
            queries: queries of the newest tokens, `(B, n_heads, L, head_dim)`.
            keys: keys returned by `update_and_fetch`.
            values: values returned by `update_and_fetch`.
            scale: scale of the logits.
            mask: None, "causal" or a bool array; see `mask_with_bias`.
            sinks: logits of attention sinks, `(n_heads,)`.

        Returns: `(B, n_heads, L, head_dim)`.
        """
        keys, values, bias = self.choose(CapturedQueries(queries, scale, sinks), keys, values)
        if bias is not None:
            mask = mask_with_bias(bias, keys.shape[2], mask)
        return mx.fast.scaled_dot_product_attention(
            queries, keys, values, scale=scale, mask=mask, sinks=sinks
        )

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """Return mlx-lm's causal mask for the next `N` tokens and the entries that they will read."""
        return create_attention_mask(N, self.size(), return_array, window_size)

    def is_trimmable(self) -> bool:
        """Return False, so that mlx-lm does not trim this cache."""
        return False


def mask_with_bias(mean_bias: mx.array, n_keys: int, mask: Any = None) -> mx.array:
    """Return an additive mask `(B, n_heads, L, n_keys)` for keys that are cluster means followed by entries.

    Args:
        mean_bias: bias of the means' logits, `(B, n_heads, L, n_means)`.
        n_keys: total number of means and entries.
        mask: None, "causal" (the last `L` entries are the queries' own), or bool `(..., L, n_keys)`. Means are never
            masked.
    """
    B, H, L, n_means = mean_bias.shape
    n_entries = n_keys - n_means
    if mask is None:
        zeros_after_means = (0, n_entries)
        return mx.pad(mean_bias, [(0, 0), (0, 0), (0, 0), zeros_after_means])
    if isinstance(mask, str):
        mask = create_causal_mask(L, n_keys - L)
    sees_entry = mask[..., n_means:]
    entry_bias = mx.where(sees_entry, mx.zeros((B, H, L, n_entries)), HIDDEN_LOGIT)
    return mx.concatenate([mean_bias, entry_bias.astype(mean_bias.dtype)], axis=-1)
