"""Decoding speed and KV memory by context length: full cache, a plain cache of as many rows, SnapKV.

    python scripts/benchmark_decode.py --contexts 8192 16384 32768

A random LLaMA on which attention dominates; its caches are filled with random rows, since only shapes
matter for speed. The three are stepped in turn in one process and the median step is reported.
"""

from __future__ import annotations

import argparse
import statistics
import time

import mlx.core as mx
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache
from rich.console import Console
from rich.table import Table

from mlx_snapkv import SnapKVCache
from mlx_snapkv.report import format_bytes

SHARE, N_WINDOW = 16, 512


def make_model() -> llama.Model:
    mx.random.seed(0)
    model = llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=256,
            num_hidden_layers=4,
            intermediate_size=512,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=64,
            rms_norm_eps=1e-5,
            vocab_size=1024,
        )
    )
    mx.eval(model.parameters())
    return model


def random_rows(model: llama.Model, n: int) -> tuple[mx.array, mx.array]:
    shape = (1, model.args.num_key_value_heads, n, model.args.head_dim)
    return mx.random.normal(shape), mx.random.normal(shape)


def plain_cache(model: llama.Model, n: int, room: int) -> list[KVCache]:
    """mlx-lm's cache holding `n` rows, with room for the steps to come."""
    caches = []
    for _ in model.layers:
        cache = KVCache()
        cache.step = n + room
        cache.update_and_fetch(*random_rows(model, n))
        caches.append(cache)
    mx.eval([c.state for c in caches])
    return caches


def compressed_cache(model: llama.Model, rows: int, context: int) -> list[SnapKVCache]:
    pinned = mx.broadcast_to(
        mx.arange(rows - N_WINDOW, dtype=mx.uint32),
        (1, model.args.num_key_value_heads, rows - N_WINDOW),
    )
    caches = [
        SnapKVCache(*random_rows(model, rows), pinned, offset=context, n_window=N_WINDOW)
        for _ in model.layers
    ]
    mx.eval([c.state for c in caches])
    return caches


def median_seconds(model: llama.Model, caches: dict[str, list], steps: int) -> dict[str, float]:
    """Median seconds of a decoding step for each cache, stepped in turn."""
    times: dict[str, list[float]] = {name: [] for name in caches}
    token = mx.array([[1]])
    for step in range(steps + 3):
        for name, cache in caches.items():
            started = time.perf_counter()
            mx.eval(model(token, cache=cache))
            if step >= 3:
                times[name].append(time.perf_counter() - started)
    return {name: statistics.median(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    model = make_model()
    table = Table(
        title=f"Decoding with 1/{SHARE} of the rows (random LLaMA, float32, {mx.default_device()})"
    )
    for name in ("context", "rows", "full", "plain, same rows", "SnapKV", "speed-up", "KV memory"):
        table.add_column(name, justify="right")
    for context in args.contexts:
        rows = max(context // SHARE, N_WINDOW + 1)
        caches = {
            "full": plain_cache(model, context, args.steps + 8),
            "plain": plain_cache(model, rows, args.steps + 8),
            "snapkv": compressed_cache(model, rows, context),
        }
        seconds = median_seconds(model, caches, args.steps)
        memory = [format_bytes(sum(c.nbytes for c in caches[name])) for name in ("full", "snapkv")]
        table.add_row(
            f"{context:,}",
            f"{rows:,}",
            *(f"{1 / seconds[name]:.1f} tok/s" for name in ("full", "plain", "snapkv")),
            f"{seconds['full'] / seconds['snapkv']:.2f}x",
            " → ".join(memory),
        )
        del caches
        mx.clear_cache()
    Console().print(table)


if __name__ == "__main__":
    main()
