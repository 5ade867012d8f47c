"""The caches that an answer is decoded from, once its prompt has been cut down."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..entries.entries import Entries
from ..entries.quantization import Quantization
from ..models import AttentionFamily
from ..policies import KeyDiff, Policy
from ..policies.budgets import UNLIMITED, Quota
from .block import BlockKVCache
from .quantized import QuantizedBlockKVCache, QuantizedReselectingSnapKVCache, QuantizedSnapKVCache
from .reselecting import ReselectingSnapKVCache
from .window import SnapKVCache

_QUANTIZED: dict[type, type] = {
    SnapKVCache: QuantizedSnapKVCache,
    ReselectingSnapKVCache: QuantizedReselectingSnapKVCache,
    BlockKVCache: QuantizedBlockKVCache,
}


def answer_cache(
    family: AttentionFamily, kept: Entries, offset: int, policy: Policy, quota: Quota, uniform: bool
) -> SnapKVCache | BlockKVCache:
    """A layer's cache for what follows the prompt.

    Args:
        family: the layer's attention family.
        kept: the rows to hold; if they are quantised, those to come will be too.
        offset: position of the next token.
        policy: what the prompt was cut down by.
        quota: what it left the layer.
        uniform: all layers hold equally many rows.
    """
    if not policy.keeps_shape:
        kept_at_most = Quota(UNLIMITED, 0, 0) if policy.on_full == "grow" else quota
        block = made(
            BlockKVCache,
            kept.quantization,
            policy,
            kept_at_most,
            policy.answer_block,
            family=family,
            uniform=uniform,
        )
        block.offset = offset
        block.hold(kept)
        return block
    n_window = min(quota.n_window, len(kept))
    pinned = mx.contiguous(kept.positions[..., : len(kept) - n_window])
    rows = (kept.stored_keys, kept.stored_values, pinned)
    options: dict[str, Any] = {"offset": offset, "n_window": quota.n_window, "uniform": uniform}
    if policy.on_full == "slide":
        cache = made(SnapKVCache, kept.quantization, *rows, **options)
    else:
        chooses = KeyDiff() if policy.on_full == "keydiff" else policy
        options |= {"policy": chooses, "block": policy.answer_block, "n_sink": quota.n_sink}
        options["family"] = family
        cache = made(ReselectingSnapKVCache, kept.quantization, *rows, **options)
    mx.eval(cache.keys, cache.values, pinned)
    return cache


def made(kind: type, quantization: Quantization | None, *args: Any, **options: Any):
    """A cache of a kind, or of the same with quantised rows."""
    if quantization is None:
        return kind(*args, **options)
    return _QUANTIZED[kind](*args, quantization=quantization, **options)
