"""Measure one model on this machine's GPU and print a Markdown table to paste into a bug report.

    make bench-gpu                      # ten minutes with the default model on a Mac
    make bench-gpu MODEL=REPOSITORY

A document hides a fact, and the prompt asks for it at the end. The full cache, SnapKV and sparse attention (with
sparse prefill) read the prompt and answer greedily. All answers have the same length, because end-of-answer tokens do
not stop them.
"""

import itertools
import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
from evaluation.tasks import contains
from mlx_lm.models.cache import make_prompt_cache
from results_page import Row, options

from mlx_snapkv import SnapKVError, generate_step
from mlx_snapkv.caches.layers import kv_bytes
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.demo.questions import make_haystack, question_prompt
from mlx_snapkv.engine.report import CompressionReport
from mlx_snapkv.measure.environment import as_table, diagnosis
from mlx_snapkv.measure.methods import FULL_CACHE
from mlx_snapkv.measure.tables import Table, as_markdown
from mlx_snapkv.planning.machine import this_machine
from mlx_snapkv.planning.memory_plan import Planner
from mlx_snapkv.planning.units import format_bytes

MODEL = "mlx-community/Llama-3.2-3B-Instruct-4bit"
SHARE = "budget=6.25%"
METHODS: dict[str, dict[str, Any]] = {
    FULL_CACHE: {},
    f"SnapKV, {SHARE}": {"snapkv": SHARE},
    f"sparse, {SHARE}": {"sparse": f"{SHARE},read=sparse,when=always"},
}
N_FIRST = 4  # first answer tokens; later ones are decoded from the compressed cache
COLUMNS = [
    "prompt",
    "cache",
    "reading",
    "tokens/s read",
    "tokens/s",
    "peak memory",
    "KV memory",
    "answer",
]


def measure(model: Any, prompt: list[int], n_tokens: int, **method: Any) -> Row:
    """Answer a prompt with `n_tokens` tokens, and return times, memory and tokens.

    `read_seconds` is the time to the first token, plus the time by which selecting entries delays the next tokens.
    `token_seconds` is the median time of the later tokens.
    """
    cache = make_prompt_cache(model)
    reports: list[CompressionReport] = []
    tokens: list[int] = []
    mx.clear_cache()
    mx.reset_peak_memory()
    times = [time.perf_counter()]
    steps = generate_step(
        mx.array(prompt),
        model,
        max_tokens=n_tokens,
        prompt_cache=cache,
        on_report=reports.append,
        **method,
    )
    for token, _ in steps:
        times.append(time.perf_counter())
        tokens.append(int(token))
    first_seconds, *seconds = [end - start for start, end in itertools.pairwise(times)]
    # The tokens that wait for the selection, and the later ones.
    delayed, undelayed = seconds[: N_FIRST - 1], seconds[N_FIRST - 1 :]
    token_seconds = statistics.median(undelayed)
    selection_seconds = max(0.0, sum(delayed) - len(delayed) * token_seconds)
    return {
        "n_prompt": len(prompt),
        "read_seconds": first_seconds + selection_seconds,
        "token_seconds": token_seconds,
        "peak_bytes": mx.get_peak_memory(),
        "kv_bytes": max(reports[0].kv_bytes_after or 0, kv_bytes(cache)),
        "tokens": tokens,
    }


def without_end(tokens: list[int], tokenizer: Any) -> list[int]:
    """Return the tokens before the first end-of-answer token."""
    return list(itertools.takewhile(lambda token: token not in tokenizer.eos_token_ids, tokens))


def fits(model: Any, length: int, n_tokens: int) -> bool:
    """Return whether the full cache of a prompt and its answer fits in memory, and print a line if not."""
    peak = Planner(model, max_tokens=n_tokens).plan(length).peak
    usable = this_machine().usable
    if peak > usable:
        say(f"{length:,} tokens would take {format_bytes(peak)} of {format_bytes(usable)}")
    return peak <= usable


def rows(model: Any, tokenizer: Any, length: int, n_tokens: int) -> Iterator[Row]:
    """Yield each method's figures for a prompt of about `length` tokens, if the full cache fits in memory."""
    if not fits(model, length, n_tokens):
        return
    document, (fact, *_) = make_haystack(tokenizer, random.Random(0), 4, length)
    prompt = question_prompt(tokenizer, document, fact.question)
    full_answer: list[int] = []
    for name, method in METHODS.items():
        say(f"{len(prompt):,} tokens, {name}")
        row = measure(model, prompt, n_tokens, **method) | {"cache": name}
        answer = without_end(row["tokens"], tokenizer)
        if name == FULL_CACHE:
            full_answer = answer
        row["same"] = answer == full_answer
        row["right"] = contains(tokenizer.decode(answer), fact.value)
        yield row


def results_table(rows: list[Row]) -> Table:
    """Return the rows as a table."""
    table = Table("", "", COLUMNS)
    full_row: Row = {}
    for row in rows:
        comparison = ", the same" if row["same"] else ", differs"
        if row["cache"] == FULL_CACHE:
            full_row = row
            comparison = ""
        ratio = full_row["token_seconds"] / row["token_seconds"]
        judgement = "right" if row["right"] else "wrong"
        table.add(
            f"{row['n_prompt']:,}",
            row["cache"],
            f"{row['read_seconds']:.1f} s",
            f"{row['n_prompt'] / row['read_seconds']:,.0f}",
            f"{1 / row['token_seconds']:.1f} ({ratio:.2f}x)",
            format_bytes(row["peak_bytes"]),
            format_bytes(row["kv_bytes"]),
            judgement + comparison,
        )
    return table


def say(text: str) -> None:
    """Print a line of progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def warm_up(model: Any, tokenizer: Any) -> None:
    """Compile the kernels, so that the first prompt does not wait for them."""
    prompt = question_prompt(tokenizer, "Nothing happened. " * 200, "What happened?")
    for method in METHODS.values():
        measure(model, prompt, N_FIRST + 1, **method)


def main() -> None:
    """Measure the requested model at each length and print the tables."""
    parser = options(__doc__)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32_768])
    parser.add_argument("--tokens", type=int, default=64, help="tokens of every answer")
    args = parser.parse_args()
    if args.tokens <= N_FIRST:
        parser.error(f"--tokens must be more than {N_FIRST}, got {args.tokens}")
    try:
        model, tokenizer = load_model(args.model)
        warm_up(model, tokenizer)
        all_rows = [
            row for length in args.lengths for row in rows(model, tokenizer, length, args.tokens)
        ]
    except SnapKVError as error:
        say(f"bench-gpu: {error}")
        sys.exit(2)
    machine = as_markdown(as_table(diagnosis(model, args.model)))
    print(f"### {args.model}\n\n{machine}\n\n{as_markdown(results_table(all_rows))}")


if __name__ == "__main__":
    main()
