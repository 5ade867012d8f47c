"""Run an mlx-snapkv command or a script with NumPy attention, to measure quality on a CPU.

    python scripts/numpy_attention.py eval fidelity --model real-models/smollm2-135m-instruct ...
    python scripts/numpy_attention.py scripts/evaluate.py data --model real-models/smollm2-135m-instruct ...

MLX's CPU backend computes exponentials one by one: a softmax takes MLX 75 ms and NumPy 3 ms. A model of 135
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
    B, H, L, _ = queries.shape
    T = keys.shape[2]
    plain = queries.dtype == keys.dtype == mx.float32 and options.get("sinks") is None
    if not plain or L * T < MIN_LOGITS:
        return _attention(queries, keys, values, scale=scale, mask=mask, **options)
    q, k, v = (np.asarray(x) for x in (queries, keys, values))
    hidden = _hidden(mask, (B, H, L, T))
    out = np.empty((B, H, L, v.shape[-1]), np.float32)
    for b, h in np.ndindex(B, H):
        kv = h * k.shape[1] // H
        logits = (q[b, h] * np.float32(scale)) @ k[b, kv].T
        if hidden is not None:
            own = hidden[b, h]
            logits = np.where(own, -np.inf, logits) if own.dtype == bool else logits + own
        np.exp(logits - logits.max(axis=-1, keepdims=True), out=logits)
        out[b, h] = (logits @ v[b, kv]) / logits.sum(axis=-1, keepdims=True)
    return mx.array(out)


def _hidden(mask: Any, shape: tuple[int, ...]) -> np.ndarray | None:
    """Expand a mask to `(B, n_heads, L, T)`: bool, True where hidden, or float32 to add to the logits."""
    if mask is None:
        return None
    L, T = shape[-2:]
    if isinstance(mask, str):
        return np.broadcast_to(np.triu(np.ones((L, T), bool), T - L + 1), shape)
    given = np.broadcast_to(np.asarray(mask), shape)
    return ~given if given.dtype == bool else given


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
