"""What choosing again costs: answers of 3,000 tokens with every on_full, side by side.

    python scripts/benchmark_long_answers.py        # writes docs/long-answers-time.json and docs/long-answers-time.md

Whole requests of mlx-snapkv's own `generate_step`, in turn in one process, on a random LLaMA that attention
dominates; the prompt's time does not count. Needs an idle machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from results_page import about, mlx_versions, write, written_by

from mlx_snapkv import SnapKV, generate_step
from mlx_snapkv.bench.random_model import NAME, make_random_model
from mlx_snapkv.policies.snapkv import ON_FULL

ROOT = Path(__file__).resolve().parent.parent
PROMPT, BUDGET = 4096, 2048
SIZE = {"budget": BUDGET, "min_ctx": 0, "lookahead": 0}


def answer(model, prompt: mx.array, on_full: str, n_tokens: int) -> dict[str, Any]:
    """Seconds a token of one answer, and the numbers of rows that its steps attended to."""
    cache = make_prompt_cache(model)
    options = {"policy": SnapKV(**SIZE, on_full=on_full), "prompt_cache": cache}
    steps = generate_step(prompt, model, max_tokens=n_tokens, **options)
    next(steps)
    rows = set()
    started = time.perf_counter()
    for n, _ in enumerate(steps, start=2):
        rows.add(cache[0].size())
        if n == n_tokens // 2:
            half = time.perf_counter()
    ended = time.perf_counter()
    return {
        "on_full": on_full,
        "seconds": ended - started,
        "second_half": ended - half,
        "fewest_rows": min(rows),
        "most_rows": max(rows),
    }


def measure(n_tokens: int, repeats: int) -> list[dict[str, Any]]:
    """Medians over the repeats, one row a way."""
    model = make_random_model()
    mx.random.seed(1)
    prompt = mx.random.randint(2, 1000, (PROMPT,))
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ON_FULL}
    for repeat in range(repeats):
        for way in ON_FULL if repeat % 2 else reversed(ON_FULL):
            found[way].append(answer(model, prompt, way, n_tokens))
            print(found[way][-1], flush=True)
    rows = []
    for answers in found.values():
        medians = {
            name: statistics.median(a[name] for a in answers) for name in ("seconds", "second_half")
        }
        rows.append(answers[0] | medians)
    return rows


def page(result: dict[str, Any]) -> str:
    """docs/long-answers-time.md, from its result."""
    slide = next(row for row in result["rows"] if row["on_full"] == "slide")
    lines = [
        "# The time of long answers",
        "",
        written_by(result),
        "",
        f"{result['model']}: a prompt of {result['prompt']:,} tokens cut to {result['budget']:,} rows "
        f"(`n_window=512`), then {result['tokens']:,} tokens; medians of {result['repeats']} answers each. On a CPU "
        "steps are compiled from the 1,000th token on, where the cache and the policy allow it: not with `grow` and "
        "`reselect`.",
        "",
        "| on_full | ms a token | of slide | second half, of slide | rows attended to |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in result["rows"]:
        each = [f"{row[part] / slide[part]:.3f}" for part in ("seconds", "second_half")]
        same = row["fewest_rows"] == row["most_rows"]
        rows = f"{row['fewest_rows']:,}" + ("" if same else f" to {row['most_rows']:,}")
        milliseconds = 1000 * row["seconds"] / result["tokens"]
        lines.append(f"| {row['on_full']} | {milliseconds:.2f} | {' | '.join(each)} | {rows} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "long-answers-time")
    args = parser.parse_args()
    result = {
        **about("benchmark_long_answers.py", *sys.argv[1:]),
        "versions": mlx_versions(),
        "model": NAME,
        "prompt": PROMPT,
        "budget": BUDGET,
        "tokens": args.tokens,
        "repeats": args.repeats,
        "rows": measure(args.tokens, args.repeats),
    }
    write(args.out, result, page(result))
    print(page(result))


if __name__ == "__main__":
    main()
