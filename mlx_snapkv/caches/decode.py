"""The caches that an answer is decoded from, once its prompt has been compressed."""

from typing import Any

import mlx.core as mx

from ..entries.entries import Entries
from ..entries.selection import top_positions
from ..policies import KeyDiff, Policy
from ..policies.budgets import UNLIMITED, Quota
from .block import BlockKVCache
from .evicting import EvictingCache
from .layers import AttentionLayer
from .window import SnapKVCache

RESERVED = 10  # of so many voted entries, the one with most votes always stays


def decode_cache(
    layer: AttentionLayer,
    kept: Entries,  # what it is to hold; if they are quantised, those to come will be too
    scores: mx.array,  # `(B, n_kv_heads, n)`, what the policy that compressed the prompt scored them
    offset: int,  # position of the next token
    policy: Policy,
    quota: Quota,  # what the policy left the layer
    uniform: bool,  # all layers hold equally many entries
    reads_again: bool = False,  # the prompt's last tokens are, so nothing is evicted
) -> EvictingCache:
    """A layer's cache for what follows the prompt."""
    block = policy.answer_block(quota.n_window)
    more: dict[str, Any] = {"uniform": uniform, "quantization": kept.quantization}
    if reads_again or policy.schedule == "block":
        most = Quota(UNLIMITED, 0, 0) if reads_again else quota
        newest = 1 if reads_again else None
        cache = BlockKVCache(policy, most, block, layer=layer, newest=newest, **more)
        cache.offset = offset
        cache.hold(kept)
        return cache
    n_window = None if policy.grows else quota.n_window
    n_pin = len(kept) - min(len(kept), n_window or 0)
    if policy.on_full == "keydiff":
        reserved = _reserved(scores[..., :n_pin], quota.n_sink)
        more |= {"policy": KeyDiff(), "block": block, "reserved": reserved}
    if kept.given_rotations is not None:
        more["rotated"] = kept.positions, kept.given_rotations
    window = SnapKVCache(
        kept.stored_keys,
        kept.stored_values,
        mx.contiguous(kept.positions[..., :n_pin]),
        offset=offset,
        n_window=n_window,
        **more,
    )
    window.layer = layer
    return window


def _reserved(scores: mx.array, n_sink: int) -> mx.array:
    """Bool `(B, n_kv_heads, n_pin)`: the sink and the best of the voted entries, which the answer never overwrites."""
    n_sink = min(n_sink, scores.shape[-1])
    n = (scores.shape[-1] - n_sink) // RESERVED
    reserved = mx.broadcast_to(mx.arange(scores.shape[-1]) < n_sink, scores.shape)
    if n == 0:
        return reserved
    best = top_positions(scores[..., n_sink:], n) + n_sink
    return mx.put_along_axis(reserved, best, mx.array(True), axis=-1)
