"""Build the cache for decoding an answer after its prompt has been compressed."""

import mlx.core as mx

from ..caches.layers import AttentionLayer
from ..entries.entries import Entries
from ..entries.quota import Quota
from .block import BlockKVCache
from .evicting import EvictingCache
from .policy import Policy
from .window import SnapKVCache


def make_decode_cache(
    layer: AttentionLayer, kept_entries: Entries, offset: int, policy: Policy, quota: Quota
) -> EvictingCache:
    """Build one layer's cache for the tokens after the prompt.

    Args:
        layer: the cache's `AttentionLayer`.
        kept_entries: the entries kept from the prompt. Entries of later tokens get the same quantisation.
        offset: position of the next token.
        policy: the policy that compressed the prompt. Its `schedule` determines the class of the cache. With
            schedule="once", its `on_full` determines whether the cache's window grows or slides.
        quota: number of entries that the policy keeps in this layer.
    """
    if policy.schedule == "block":
        block_cache = BlockKVCache(
            policy, quota, policy.block, layer=layer, quantization=kept_entries.quantization
        )
        block_cache.offset = offset
        block_cache.replace_entries(kept_entries)
        return block_cache
    n_pinned = len(kept_entries)
    n_window = None  # the window starts empty and grows
    if not policy.grows:  # the newest entries go into the sliding window
        n_window = quota.n_window
        n_pinned = max(0, n_pinned - n_window)
    window_cache = SnapKVCache(
        kept_entries.stored_keys,
        kept_entries.stored_values,
        mx.contiguous(kept_entries.positions[..., :n_pinned]),
        offset=offset,
        n_window=n_window,
        quantization=kept_entries.quantization,
    )
    window_cache.layer = layer
    return window_cache
