"""Limiting the memory of attention scores that MLX stores, by reading fewer tokens at once.

MLX's attention function computes many queries without storing their scores only on a GPU, and only for heads of some
sizes (`is_fused`). For others, and on a CPU for all, it stores a number for each query, entry and head: 8.6 GB in
half precision for 2,048 tokens after 131,072, of 16 heads.
"""

import math

import mlx.core as mx

from .machine import this_machine

FUSED = (64, 80, 128)  # head sizes of MLX's GPU kernels (0.32)

MAX_SCORE_BYTES = 512 << 20  # bytes of attention scores computed at a time, at most
SCORES_MEMORY_SHARE = 32  # scores take at most 1/32 of the machine's memory
MIN_TOKENS_AT_ONCE = 32  # tokens of a prompt read at once, however large their scores


def on_gpu() -> bool:
    """Return whether MLX computes on a GPU by default."""
    return mx.default_device().type == mx.gpu


def is_fused(head_size: int) -> bool:
    """Return whether MLX computes the attention of such heads, for many queries, without storing scores."""
    return on_gpu() and head_size in FUSED


def largest_chunk() -> int:
    """Return the largest number of tokens to read at a time.

    On a GPU this is mlx-lm's default. A CPU also computes the scores that the causal mask hides, and smaller chunks
    have fewer of them.
    """
    return 2048 if on_gpu() else 512


def scores_limit() -> int:
    """Return the bytes that a layer's scores may take on this machine."""
    return min(MAX_SCORE_BYTES, this_machine().memory // SCORES_MEMORY_SHARE)


def tokens_at_once(n_before: int, pair_bytes: int, limit: int) -> int:
    """Return how many tokens to read at once after `n_before` entries, for scores of at most `limit` bytes a layer.

    They see those entries and each other: n tokens have n * (n_before + n) pairs of a query and an entry. The result is
    a multiple of `MIN_TOKENS_AT_ONCE`, and never less.

    Args:
        n_before: number of entries before these tokens.
        pair_bytes: bytes of the scores of one query and one entry in all of a layer's heads; see `shapes.score_bytes`.
        limit: bytes of a layer's scores.
    """
    max_pairs = limit // pair_bytes
    # The positive root of n**2 + n_before * n = max_pairs.
    n_tokens = (math.isqrt(n_before * n_before + 4 * max_pairs) - n_before) // 2
    return max(MIN_TOKENS_AT_ONCE, n_tokens // MIN_TOKENS_AT_ONCE * MIN_TOKENS_AT_ONCE)
