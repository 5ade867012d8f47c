"""Limits how much memory attention scores take, by reading fewer tokens at once.

MLX's fused attention, which never stores the scores, is only available on a GPU and for some head sizes (`is_fused`).
Otherwise, MLX stores one score per query-entry pair and head. With 16 heads, the scores of 2,048 tokens that follow
131,072 others take 8.7 GB in half precision.
"""

import math

import mlx.core as mx

from .machine import this_machine

FUSED = (64, 80, 128)  # head sizes that MLX's fused GPU kernels support (MLX 0.32)

MAX_SCORE_BYTES = 512 << 20  # size limit for one layer's attention scores
SCORES_MEMORY_SHARE = 32  # scores take at most 1/32 of the machine's memory
MIN_TOKENS_AT_ONCE = 32  # chunks of at most this many tokens are not split


def on_gpu() -> bool:
    """Return whether MLX computes on a GPU by default."""
    return mx.default_device().type == mx.gpu


def is_fused(head_size: int) -> bool:
    """Return whether MLX has a fused attention kernel for many queries with this head size."""
    return on_gpu() and head_size in FUSED


def largest_chunk() -> int:
    """Return the maximum number of tokens per chunk.

    On a GPU, this is mlx-lm's default. On a CPU, it is smaller, because a CPU also computes scores that the causal mask
    hides, and smaller chunks have fewer of them.
    """
    return 2048 if on_gpu() else 512


def scores_limit() -> int:
    """Return the size limit for one layer's scores on this machine, in bytes."""
    return min(MAX_SCORE_BYTES, this_machine().memory // SCORES_MEMORY_SHARE)


def tokens_at_once(n_before: int, pair_bytes: int, limit: int) -> int:
    """Return how many tokens to read at once so that a layer's scores take at most `limit` bytes.

    The tokens attend to `n_before` entries and to each other, so n tokens have n * (n_before + n) query-entry pairs.
    The result is a positive multiple of `MIN_TOKENS_AT_ONCE`, even if the limit is too small for that.

    Args:
        n_before: number of entries before the tokens.
        pair_bytes: score bytes per query-entry pair, for all heads of a layer; see `shapes.score_bytes`.
        limit: size limit for a layer's scores in bytes.
    """
    max_pairs = limit // pair_bytes
    # The positive root of n**2 + n_before * n = max_pairs.
    n_tokens = (math.isqrt(n_before * n_before + 4 * max_pairs) - n_before) // 2
    return max(MIN_TOKENS_AT_ONCE, n_tokens // MIN_TOKENS_AT_ONCE * MIN_TOKENS_AT_ONCE)
