"""Attention of the last few tokens to many entries, as a CPU takes it fastest.

MLX's own attention masks every score, takes exponentials one by one, and multiplies each query head of a group alone.
Here a group's queries are the rows of one product, powers of two take a third of the time, and only the last entries
are masked. Metal has a kernel of its own for so few queries, which stays in use there.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from .attention import LOG2_E

FEW = 17  # tokens: the most drafts of a round, and the one before them
_here = threading.local()


@contextlib.contextmanager
def in_use() -> Iterator[None]:
    """For the block, let patched attention classes attend so where they can; nothing changes but on a CPU."""
    outer = _attends()
    _here.attends = mx.default_device().type == mx.cpu
    try:
        yield
    finally:
        _here.attends = outer


def _attends() -> bool:
    return getattr(_here, "attends", False)


def can_attend(queries: mx.array, keys: Any, mask: Any) -> bool:
    """Whether this attention is one of few float32 queries, of the last entries' tokens, within `in_use()`."""
    if not _attends() or not isinstance(keys, mx.array) or keys.dtype != mx.float32:
        return False
    L, T = queries.shape[2], keys.shape[2]
    causal = mask == "causal" if isinstance(mask, str) else mask is None and L == 1
    return causal and L <= FEW and T > L


def attend(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Causal attention of the last `L` positions: `(B, n_heads, L, value_dim)`.

    Args:
        queries: `(B, n_heads, L, head_dim)` float32.
        keys: `(B, n_kv_heads, T, head_dim)` float32, those of the queries' own tokens last.
        values: `(B, n_kv_heads, T, value_dim)`.
    """
    B, n_heads, L, D = queries.shape
    H, T = keys.shape[1:3]
    rows = (queries * (scale * LOG2_E)).reshape(B, H, -1, D)
    before, own = slice(0, T - L), slice(T - L, T)
    logits = rows @ keys[:, :, before].swapaxes(-1, -2)
    among = (rows @ keys[:, :, own].swapaxes(-1, -2)).reshape(B, n_heads, L, L)
    hidden = mx.arange(L)[:, None] < mx.arange(L)
    among = mx.where(hidden, -mx.inf, among).reshape(B, H, -1, L)
    top = mx.maximum(logits.max(axis=-1, keepdims=True), among.max(axis=-1, keepdims=True))
    weights, own_weights = mx.power(2, logits - top), mx.power(2, among - top)
    total = weights.sum(axis=-1, keepdims=True) + own_weights.sum(axis=-1, keepdims=True)
    attended = weights @ values[:, :, before] + own_weights @ values[:, :, own]
    return (attended / total).reshape(B, n_heads, L, -1)
