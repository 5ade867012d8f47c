"""Decoding speed after the cut with and without compiled steps, and what building their kernels costs once.

    python scripts/benchmark_compiled.py

mlx-lm's own loop decodes on two copies of one compressed cache, ten tokens of each in turn; a repeat's speed is
that of its median ten. The first step is timed in fresh processes, with no kernels on disk and with them.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time

import mlx.core as mx
from mlx_lm import load
from mlx_lm.generate import generate_step, generation_stream
from rich.console import Console
from rich.table import Table

from mlx_snapkv import SnapKV, prefill
from mlx_snapkv.bench.random_model import make_random_model
from mlx_snapkv.compiled import CompiledDecoder
from mlx_snapkv.demo import MODELS

RANDOM = "random LLaMA"
REPEATS, CHUNKS, CHUNK = 3, 40, 10


def make_model(name: str):
    if name == RANDOM:
        return make_random_model()
    model, _ = load(str(MODELS[name]))
    model.set_dtype(mx.float32)
    return model


def compressed_cache(model, rows: int) -> list:
    """A prompt of twice as many random tokens, cut to `rows`."""
    mx.random.seed(0)
    tokens = mx.random.randint(2, 1000, (2 * rows,))
    return prefill(
        model, tokens, SnapKV(n_window=64, n_sink=4, top_k=rows - 68, min_ctx=0, on_full="slide")
    )[0]


def step_seconds(model, cache: list) -> tuple[float, float]:
    """Median seconds of an ordinary and of a compiled step."""
    runs = [
        generate_step(mx.array([5]), m, max_tokens=-1, prompt_cache=copy.deepcopy(cache))
        for m in (model, CompiledDecoder(model, wait=0))
    ]
    times: list[list[float]] = [[], []]
    tokens: list[list[int]] = [[], []]
    for i in range(CHUNKS):
        for j in (0, 1) if i % 2 else (1, 0):
            mx.synchronize(generation_stream)  # each of the two keeps one step in flight
            started = time.perf_counter()
            tokens[j] += [token for token, _ in itertools.islice(runs[j], CHUNK)]
            mx.synchronize(generation_stream)
            times[j].append((time.perf_counter() - started) / CHUNK)
    assert tokens[0] == tokens[1], "compiled steps gave other tokens"
    return statistics.median(times[0]), statistics.median(times[1])


def print_first_step(name: str) -> None:
    model = make_model(name)
    cache = compressed_cache(model, 512)
    mx.eval(model(mx.array([[5]]), cache=copy.deepcopy(cache)))
    started = time.perf_counter()
    mx.eval(CompiledDecoder(model, wait=0)(mx.array([[5]]), cache=cache))
    print(time.perf_counter() - started)


def first_step_seconds(name: str) -> list[float]:
    """Seconds of a request's first compiled step: kernels to be built, and built before."""
    command = [sys.executable, __file__, "--first-step", name]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TMPDIR": folder}
        return [float(subprocess.check_output(command, env=environment)) for _ in range(2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 2048])
    parser.add_argument("--first-step", metavar="MODEL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.first_step:
        return print_first_step(args.first_step)
    table = Table(
        title=f"Decoding after the cut, float32, MLX {mx.__version__}, {mx.default_device()}",
        caption="First step: the kernels to be built, and built before. Earned back: the first kind of it.",
    )
    for title in "model|rows|plain|compiled|speed-ups|first step|earned back after".split("|"):
        table.add_column(title, justify="right")
    for name in (*MODELS, RANDOM):
        model = make_model(name)
        cold, warm = first_step_seconds(name)
        for rows in args.rows:
            cache = compressed_cache(model, rows)
            repeats = [step_seconds(model, cache) for _ in range(REPEATS)]
            plain, compiled = (statistics.median(r[i] for r in repeats) for i in (0, 1))
            table.add_row(
                name,
                f"{rows:,}",
                *(f"{1 / seconds:.0f} tok/s" for seconds in (plain, compiled)),
                ", ".join(f"{p / c:.2f}x" for p, c in repeats),
                f"{cold:.1f} s, {warm:.2f} s",
                f"{cold / (plain - compiled):,.0f} tokens" if plain > compiled else "never",
            )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
