"""Run an mlx-snapkv command or a script with NumPy attention, to measure quality on a CPU.

    python scripts/numpy_attention.py eval fidelity --model real-models/smollm2-135m-instruct ...
    python scripts/numpy_attention.py scripts/evaluate.py data --model real-models/smollm2-135m-instruct ...

MLX's CPU backend computes exponentials one by one: NumPy needs 3 ms for a softmax that takes MLX 75 ms. A model of 135
million parameters runs faster with NumPy in float32, and its log-probabilities change by less than 1e-4. Only scripts
that measure quality use this module; a Mac does not need it.
"""

import runpy
import sys
from typing import Any

import mlx.core as mx
import numpy as np

MIN_LOGITS = 4096  # logits per head; with fewer, MLX is as fast

_attention = mx.fast.scaled_dot_product_attention


def attention(queries, keys, values, *, scale: float, mask: Any = None, **options) -> mx.array:
    """Compute `mx.fast.scaled_dot_product_attention` in NumPy if arrays are float32 and have no sinks, else in MLX."""
    B, n_heads, L, _ = queries.shape
    T = keys.shape[2]
    is_float32 = queries.dtype == keys.dtype == mx.float32
    has_sinks = options.get("sinks") is not None
    if not is_float32 or has_sinks or L * T < MIN_LOGITS:
        return _attention(queries, keys, values, scale=scale, mask=mask, **options)
    q, k, v = (np.asarray(array) for array in (queries, keys, values))
    n_kv_heads, head_dim = v.shape[1], v.shape[-1]
    masks = _expanded_mask(mask, (B, n_heads, L, T))
    output = np.empty((B, n_heads, L, head_dim), np.float32)
    for b, head in np.ndindex(B, n_heads):
        kv_head = head * n_kv_heads // n_heads
        logits = (q[b, head] * np.float32(scale)) @ k[b, kv_head].T
        if masks is not None and masks.dtype == bool:
            logits = np.where(masks[b, head], -np.inf, logits)
        elif masks is not None:
            logits = logits + masks[b, head]
        weights = logits - logits.max(axis=-1, keepdims=True)
        np.exp(weights, out=weights)
        output[b, head] = (weights @ v[b, kv_head]) / weights.sum(axis=-1, keepdims=True)
    return mx.array(output)


def _expanded_mask(mask: Any, shape: tuple[int, ...]) -> np.ndarray | None:
    """Expand a mask to `(B, n_heads, L, T)`: bool, True where hidden, or float32 to add to the logits."""
    if mask is None:
        return None
    L, T = shape[-2:]
    if isinstance(mask, str):
        is_future = np.triu(np.ones((L, T), bool), T - L + 1)
        return np.broadcast_to(is_future, shape)
    expanded = np.broadcast_to(np.asarray(mask), shape)
    # MLX's bool masks are True where a key is visible.
    return ~expanded if expanded.dtype == bool else expanded


def install() -> None:
    """Make MLX and mlx-lm use `attention`, unless MLX runs on a GPU."""
    if mx.default_device().type == mx.cpu:
        mx.fast.scaled_dot_product_attention = attention


if __name__ == "__main__":
    install()
    if sys.argv[1:] and sys.argv[1].endswith(".py"):
        del sys.argv[0]
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        from mlx_snapkv.__main__ import main

        sys.argv[0] = "mlx-snapkv"
        main()
