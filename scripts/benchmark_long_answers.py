"""What choosing again costs: answers of 3,000 tokens with every on_full, side by side.

    python scripts/benchmark_long_answers.py        # writes docs/long-answers-time.json and docs/long-answers-time.md

Whole requests of mlx-snapkv's own `generate_step` on a random LLaMA that attention dominates, a few tokens of each in
turn, so that what else the machine does hits all of them alike; the prompt's time does not count.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from results_page import about, mlx_versions, write, written_by
from rich.progress import track

from mlx_snapkv import SnapKV, generate_step
from mlx_snapkv.bench.random_model import NAME, make_random_model
from mlx_snapkv.policies.snapkv import ON_FULL

ROOT = Path(__file__).resolve().parent.parent
PROMPT, BUDGET = 4096, 2048
TURN = 25
SIZE = {"budget": BUDGET, "min_ctx": 0, "lookahead": 0}


class Answer:
    """One answer, decoded a turn at a time."""

    def __init__(self, model, prompt: mx.array, on_full: str, n_tokens: int):
        self.on_full, self.n_tokens = on_full, n_tokens
        self.cache = make_prompt_cache(model)
        options = {"policy": SnapKV(**SIZE, on_full=on_full), "prompt_cache": self.cache}
        self._steps = generate_step(prompt, model, max_tokens=n_tokens, **options)
        next(self._steps)
        self.done = 1
        self.seconds = self.second_half = 0.0
        self.entries: set[int] = set()

    def go_on(self) -> None:
        """Decode `TURN` tokens, and the one that mlx-lm is ahead."""
        started = time.perf_counter()
        for _ in islice(self._steps, TURN):
            self.done += 1
            self.entries.add(self.cache[0].size())
        mx.synchronize()
        seconds = time.perf_counter() - started
        self.seconds += seconds
        if self.done > self.n_tokens // 2:
            self.second_half += seconds

    def record(self) -> dict[str, Any]:
        return {
            "on_full": self.on_full,
            "seconds": self.seconds,
            "second_half": self.second_half,
            "fewest_entries": min(self.entries),
            "most_entries": max(self.entries),
        }


def measure(n_tokens: int) -> list[dict[str, Any]]:
    """One record an answer."""
    model = make_random_model()
    mx.random.seed(1)
    prompt = mx.random.randint(2, 1000, (PROMPT,))
    answers = [Answer(model, prompt, way, n_tokens) for way in ON_FULL]
    for turn in track(range(math.ceil(n_tokens / TURN)), "decoding"):
        for answer in answers if turn % 2 else reversed(answers):
            answer.go_on()
    return [answer.record() for answer in answers]


def page(result: dict[str, Any]) -> str:
    """docs/long-answers-time.md, from its result."""
    slide = next(row for row in result["rows"] if row["on_full"] == "slide")
    lines = [
        "# The time of long answers",
        "",
        written_by(result),
        "",
        f"{result['model']}: a prompt of {result['prompt']:,} tokens compressed to {result['budget']:,} entries "
        f"(`n_window=512`), then {result['tokens']:,} tokens, {result['turn']} of each answer in turn.",
        "",
        "| on_full | ms a token | of slide | second half, of slide | entries attended to |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for row in result["rows"]:
        each = [f"{row[part] / slide[part]:.3f}" for part in ("seconds", "second_half")]
        same = row["fewest_entries"] == row["most_entries"]
        entries = f"{row['fewest_entries']:,}" + ("" if same else f" to {row['most_entries']:,}")
        milliseconds = 1000 * row["seconds"] / result["tokens"]
        lines.append(f"| {row['on_full']} | {milliseconds:.2f} | {' | '.join(each)} | {entries} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "long-answers-time")
    args = parser.parse_args()
    result = {
        **about("benchmark_long_answers.py", *sys.argv[1:]),
        "versions": mlx_versions(),
        "model": NAME,
        "prompt": PROMPT,
        "budget": BUDGET,
        "tokens": args.tokens,
        "turn": TURN,
        "rows": measure(args.tokens),
    }
    write(args.out, result, page(result))
    print(page(result))


if __name__ == "__main__":
    main()
