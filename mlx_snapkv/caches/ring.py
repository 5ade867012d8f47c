"""The arithmetic of a window that slides in place: pure functions of whole numbers and scores."""

import mlx.core as mx
import numpy as np

from ..policies.budgets import Quota


def visible(n_pin: int, held: int, n_window: int, N: int, oldest: int) -> np.ndarray:
    """What each of `N` tokens sees, bool `(N, n_pin + held + N)`: the pinned, and the last `n_window` up to its own.

    Args:
        held: entries behind the pinned ones: a ring of at most `n_window`, its oldest at `oldest`, then the pending.
    """
    age = np.arange(-n_pin, held + N)  # by row; in the ring, which turns, counted from its oldest
    ring = slice(n_pin, n_pin + min(held, n_window))
    age[ring] = (age[ring] - oldest) % min(max(held, 1), n_window)
    newest = held + np.arange(N)[:, None]
    pinned = np.arange(n_pin + held + N) < n_pin
    return pinned | ((newest - n_window < age) & (age <= newest))


def layout(scores: mx.array, n_pin: int, n_keep: int, recent: int) -> mx.array:
    """Which of the `n_keep` best of `(B, n_kv_heads, T)` goes to which row, uint32 `(B, n_kv_heads, n)`.

    First the `n_pin` best of all but the `recent` newest, then the others, then the newest, each in order of position.
    """
    T = scores.shape[-1]
    n_keep, recent = min(T, n_keep), min(recent, T - n_pin)
    n_best = n_pin + recent
    best, all_kept = (Quota(n, 0, recent).select(scores) for n in (n_best, n_keep))
    row = mx.arange(T, dtype=mx.uint32)
    chance = mx.full(scores.shape, T, mx.uint32)
    chance = mx.put_along_axis(chance, all_kept, mx.take(row, all_kept), axis=-1)
    chance = mx.put_along_axis(chance, best, mx.array(T, mx.uint32), axis=-1)
    others = mx.sort(chance, axis=-1)[..., : n_keep - n_best]
    return mx.concatenate([best[..., :n_pin], others, best[..., n_pin:]], axis=-1)
