"""The additive mask of an attention call whose first entries are cluster means, each with a bias."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from ..entries.attention import HIDDEN


def biased(bias: mx.array, n: int, mask: Any = None) -> mx.array:
    """Return an additive mask `(B, n_heads, L, n)` for `n` entries, of which the first `n_means` are cluster means.

    Args:
        bias: added to the means' logits, `(B, n_heads, L, n_means)`.
        mask: of the entries after the means: None, "causal" (aligned with the last entry), or bool `(..., L, n)`.
    """
    B, H, L, n_means = bias.shape
    if isinstance(mask, str):
        mask = create_causal_mask(L, n - L)
    if mask is None:
        return mx.pad(bias, [(0, 0)] * 3 + [(0, n - n_means)])
    others = mx.where(mask[..., n_means:], mx.zeros((B, H, L, n - n_means)), HIDDEN)
    return mx.concatenate([bias, others.astype(bias.dtype)], axis=-1)
