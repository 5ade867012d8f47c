"""Attention of a few tokens that come together to all entries, block by block.

A block's logits fit a CPU's cache, and the outputs of the blocks are weighed by their shares of the softmax (Milakov
and Gimelshein, 2018, arXiv:1805.02867; Dao et al., 2022, arXiv:2205.14135). For 9 to 17 tokens and 65,536 entries that
takes about half the time of MLX's attention function on a CPU with OpenBLAS, which spends most of it on exponentials:
powers of two cost a third of those. A GPU has kernels of its own.
"""

import mlx.core as mx

from . import device
from .attention import HIDDEN, LOG2_E

BLOCK = 2048  # entries


def suits(queries: mx.array, keys: object, mask: object, sinks: object) -> bool:
    """Whether `blockwise_attention` computes such a call, and faster than MLX's attention function."""
    several = queries.shape[2] > 1 and isinstance(mask, str) and sinks is None
    plain = isinstance(keys, mx.array) and keys.dtype == queries.dtype == mx.float32
    return device.used.blockwise and several and plain


def blockwise_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float
) -> mx.array:
    """Causal attention, the last query with the last entry: `(B, n_heads, L, head_dim)`.

    Args:
        queries: `(B, n_heads, L, head_dim)`, each KV head's together.
        keys, values: `(B, n_kv_heads, n, head_dim)`, `n >= L`.
    """
    B, H, n, _ = keys.shape
    L = queries.shape[2]
    heads = (queries * (scale * LOG2_E)).reshape(B, H, -1, queries.shape[3])
    first = n - L  # position of the first query
    starts = [*range(0, first, BLOCK), first]
    tops: list[mx.array] = []
    sums: list[mx.array] = []
    outputs: list[mx.array] = []
    for start, stop in zip(starts, [*starts[1:], n]):
        logits = heads @ mx.depends(keys[:, :, start:stop], outputs[-1:]).mT
        if start == first:
            own = mx.tile(mx.arange(L), heads.shape[2] // L)[:, None]
            logits = mx.where(mx.arange(L) <= own, logits, HIDDEN)
        tops.append(logits.max(axis=-1, keepdims=True))
        weights = mx.power(2, logits - tops[-1])
        sums.append(weights.sum(axis=-1, keepdims=True))
        outputs.append(weights @ values[:, :, start:stop])
    top = mx.stack(tops)
    shares = mx.power(2, top - top.max(axis=0))
    total = (shares * mx.stack(sums)).sum(axis=0)
    return ((shares * mx.stack(outputs)).sum(axis=0) / total).reshape(*queries.shape[:3], -1)
