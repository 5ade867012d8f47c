"""Build the cache for decoding an answer after its prompt has been compressed."""

import mlx.core as mx

from ..caches.layers import AttentionLayer
from ..entries.entries import Entries
from ..entries.quota import Quota
from .block import BlockKVCache
from .evicting import EvictingCache
from .policy import Policy
from .window import SnapKVCache


def decode_cache(
    layer: AttentionLayer, kept: Entries, offset: int, policy: Policy, quota: Quota
) -> EvictingCache:
    """Build one layer's cache for the tokens after the prompt.

    Args:
        layer: the cache's `AttentionLayer`.
        kept: the entries kept from the prompt. Later entries get the same quantisation.
        offset: position of the next token.
        policy: the policy that compressed the prompt. Its `schedule` and `on_full` determine the type of the cache.
        quota: number of entries that the policy keeps in this layer.
    """
    if policy.schedule == "block":
        cache = BlockKVCache(
            policy,
            quota,
            policy.block,
            layer=layer,
            quantization=kept.quantization,
        )
        cache.offset = offset
        cache.replace_entries(kept)
        return cache
    n_window = None if policy.grows else quota.n_window
    # A sliding window starts with the newest entries, a growing window starts empty.
    n_in_window = 0 if n_window is None else min(len(kept), n_window)
    n_pin = len(kept) - n_in_window
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
