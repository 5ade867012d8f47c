"""Measure random models in the shapes of an 8B model and a 30B-A3B mixture of experts on this machine's GPU.

    make bench-shapes                   # the kernels' tests first; 61 GB for the larger one
    python scripts/bench_shapes.py --shapes 8b --lengths 8192 32768

Only shapes matter for speed, so the weights are random bfloat16 numbers. Each method answers every prompt twice,
because the first request may compile kernels. The table is printed row by row, in Markdown.
"""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from bench_gpu import FULL_CACHE, N_FIRST, Row, fits, measure, say
from mlx.utils import tree_map
from model_shapes import llama_8b, qwen3_30b_a3b
from results_page import options

from mlx_snapkv.measure.contenders import random_prompt
from mlx_snapkv.planning.speed_record import PATH_VARIABLE
from mlx_snapkv.planning.units import format_bytes

METHODS: dict[str, dict[str, Any]] = {
    FULL_CACHE: {},
    "SnapKV, 1/16": {"snapkv": "budget=6.25%"},
    "sparse, 1/16, read and decoded": {"sparse": "budget=6.25%,read=sparse,when=always"},
    "sparse, 1/16": {"sparse": "budget=6.25%"},
}
COLUMNS = ["shape", "prompt", "cache", "request", "first token", "tokens/s", "peak memory"]
N_REQUESTS = 2


SHAPES = {"8b": llama_8b, "30b-a3b": qwen3_30b_a3b}


def with_random_weights(model: Any) -> Any:
    """Replace all of a model's parameters with random bfloat16 numbers and return the model."""

    def random_like(weight: mx.array) -> mx.array:
        return mx.random.normal(weight.shape, mx.bfloat16, scale=0.02)

    model.update(tree_map(random_like, model.parameters()))
    mx.eval(model.parameters())
    return model


def rows(shape: str, model: Any, lengths: list[int], n_tokens: int) -> Iterator[list[str]]:
    """Yield a table row for each length, method and request. Lengths that don't fit in memory are skipped."""
    for length in lengths:
        if not fits(model, length, n_tokens):
            continue
        prompt = random_prompt(length).tolist()
        full_rows: list[Row] = []
        for name, method in METHODS.items():
            for i in range(N_REQUESTS):
                row = measure(model, prompt, n_tokens, **method)
                if name == FULL_CACHE:
                    full_rows.append(row)
                yield [shape, f"{length:,}", name, str(i + 1), *figure_cells(row, full_rows[i])]


def figure_cells(row: Row, full_row: Row) -> list[str]:
    """Return a request's times, each with its ratio to the full cache's, and its peak memory."""
    read_seconds, token_seconds = row["read_seconds"], row["token_seconds"]
    return [
        f"{read_seconds:.2f} s ({read_seconds / full_row['read_seconds']:.2f}x)",
        f"{1 / token_seconds:.1f} ({full_row['token_seconds'] / token_seconds:.2f}x)",
        format_bytes(row["peak_bytes"]),
    ]


def main() -> None:
    """Print the table for the requested shapes, row by row."""
    parser = options(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32_768, 131_072])
    parser.add_argument("--tokens", type=int, default=128, help="tokens of every answer")
    args = parser.parse_args()
    if args.tokens <= N_FIRST:
        parser.error(f"--tokens must be more than {N_FIRST}, got {args.tokens}")
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        # The second request uses what the first one measured, as in normal use.
        os.environ[PATH_VARIABLE] = str(Path(folder, "speed.json"))
        for shape in args.shapes:
            say(f"making {shape}")
            model = with_random_weights(SHAPES[shape]())
            for row in rows(shape, model, args.lengths, args.tokens):
                print(f"| {' | '.join(row)} |", flush=True)
            del model
            mx.clear_cache()


if __name__ == "__main__":
    main()
