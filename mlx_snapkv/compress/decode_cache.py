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
        kept_entries: the entries kept from the prompt. Later entries get the same quantisation.
        offset: position of the next token.
        policy: the policy that compressed the prompt. Its `schedule` and `on_full` determine the type of the cache.
        quota: number of entries that the policy keeps in this layer.
    """
    cache: EvictingCache
    if policy.schedule == "block":
        cache = _block_cache(kept_entries, offset, policy, quota)
    elif policy.grows:  # all entries are pinned, and the window starts empty
        cache = _window_cache(kept_entries, offset, n_pinned=len(kept_entries), n_window=None)
    else:  # the newest entries go into the sliding window
        n_pinned = max(0, len(kept_entries) - quota.n_window)
        cache = _window_cache(kept_entries, offset, n_pinned, quota.n_window)
    cache.layer = layer
    return cache


def _block_cache(kept_entries: Entries, offset: int, policy: Policy, quota: Quota) -> BlockKVCache:
    """Build a cache that keeps evicting with `policy`."""
    cache = BlockKVCache(policy, quota, policy.block, quantization=kept_entries.quantization)
    cache.offset = offset
    cache.replace_entries(kept_entries)
    return cache


def _window_cache(
    kept_entries: Entries, offset: int, n_pinned: int, n_window: int | None
) -> SnapKVCache:
    """Build a cache that pins the first `n_pinned` kept entries. The rest go into its window."""
    return SnapKVCache(
        kept_entries.stored_keys,
        kept_entries.stored_values,
        mx.contiguous(kept_entries.positions[..., :n_pinned]),
        offset=offset,
        n_window=n_window,
        quantization=kept_entries.quantization,
    )
