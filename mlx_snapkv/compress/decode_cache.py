"""The caches that an answer is decoded from, once its prompt has been compressed."""

import mlx.core as mx

from ..caches.layers import AttentionLayer
from ..entries.entries import Entries
from ..entries.quota import Quota
from .block import BlockKVCache
from .evicting import EvictingCache
from .policy import Policy
from .window import SnapKVCache


def decode_cache(
    layer: AttentionLayer,
    kept: Entries,  # what it is to hold; if they are quantised, those to come will be too
    offset: int,  # position of the next token
    policy: Policy,
    quota: Quota,  # what the policy left the layer
) -> EvictingCache:
    """A layer's cache for what follows the prompt."""
    if policy.schedule == "block":
        cache = BlockKVCache(
            policy,
            quota,
            policy.block,
            layer=layer,
            quantization=kept.quantization,
        )
        cache.offset = offset
        cache.hold(kept)
        return cache
    n_window = None if policy.grows else quota.n_window
    n_pin = len(kept) - min(len(kept), n_window or 0)
    window = SnapKVCache(
        kept.stored_keys,
        kept.stored_values,
        mx.contiguous(kept.positions[..., :n_pin]),
        offset=offset,
        n_window=n_window,
        quantization=kept.quantization,
    )
    window.layer = layer
    return window
