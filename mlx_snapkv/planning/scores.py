"""Limit the memory of attention scores by reading fewer tokens at once.

MLX's attention function avoids storing the scores of many queries only on a GPU, and only for some head sizes
(`is_fused`). Otherwise it stores a number for each query, entry and head. For 2,048 tokens after 131,072 with 16 heads,
this takes 8.6 GB in half precision.
"""

import math

import mlx.core as mx

from .machine import this_machine

FUSED = (64, 80, 128)  # head sizes of MLX's GPU kernels (0.32)

MAX_SCORE_BYTES = 512 << 20  # maximum bytes of attention scores that are computed together
SCORES_MEMORY_SHARE = 32  # scores take at most 1/32 of the machine's memory
MIN_TOKENS_AT_ONCE = 32  # this many prompt tokens are read at once, however large their scores are


def on_gpu() -> bool:
    """Return whether MLX computes on a GPU by default."""
    return mx.default_device().type == mx.gpu


def is_fused(head_size: int) -> bool:
    """Return whether MLX computes the attention of many queries without storing scores, for this head size."""
    return on_gpu() and head_size in FUSED


def largest_chunk() -> int:
    """Return the maximum number of tokens per chunk.

    On a GPU this is mlx-lm's default. A CPU also computes scores that the causal mask hides, of which smaller chunks
    have fewer.
    """
    return 2048 if on_gpu() else 512


def scores_limit() -> int:
    """Return the maximum bytes of a layer's scores on this machine."""
    return min(MAX_SCORE_BYTES, this_machine().memory // SCORES_MEMORY_SHARE)


def tokens_at_once(n_before: int, pair_bytes: int, limit: int) -> int:
    """Return how many tokens to read at once after `n_before` entries, if a layer's scores may take `limit` bytes.

    The tokens see these entries and each other, so n tokens have n * (n_before + n) pairs of query and entry. The
    result is a multiple of `MIN_TOKENS_AT_ONCE`, and at least that.

    Args:
        n_before: number of entries before these tokens.
        pair_bytes: bytes of the scores of one query and one entry in all heads of a layer; see `shapes.score_bytes`.
        limit: maximum bytes of a layer's scores.
    """
    max_pairs = limit // pair_bytes
    # The positive root of n**2 + n_before * n = max_pairs.
    n_tokens = (math.isqrt(n_before * n_before + 4 * max_pairs) - n_before) // 2
    return max(MIN_TOKENS_AT_ONCE, n_tokens // MIN_TOKENS_AT_ONCE * MIN_TOKENS_AT_ONCE)
