"""Measure a book: a long prompt whose entries are in files, followed by several questions about it.

    python scripts/measure_books.py                      # writes docs/books.json; then: make docs
    python scripts/measure_books.py --lengths 1048576 --out build/books

The book is measured at every length. Then the full cache is measured at the first length, half of it and a quarter.
"""

import os
import statistics
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from results_page import Result, result_options, watched

from mlx_snapkv.caches.layers import file_bytes, kv_bytes, n_tokens
from mlx_snapkv.measure.contenders import RANDOM, make_random_model, random_prompt
from mlx_snapkv.measure.speed import N_ANSWER, Row, answer_prompt
from mlx_snapkv.sparse.options import Sparse

READS = Sparse(budget=1664, n_sink=128, n_window=512, read_top_k=1024, store="file")
QUESTION_TOKENS = 32
N_QUESTIONS = 3

# Prompt tokens, name, entries read per chunk, options for the answer.
Case = tuple[int, str, int, dict[str, Any]]


def cases(lengths: list[int]) -> list[Case]:
    """Return the cases in the order of measurement."""
    first_length = lengths[0]
    n_read = READS.reach(first_length).max_read
    full_lengths = [first_length // 4, first_length // 2, first_length]
    return [
        *((length, "book", n_read, {"sparse": READS}) for length in lengths),
        *((length, "full cache", length, {}) for length in full_lengths),
    ]


def measure(model, case: Case) -> Row:
    """Read a random prompt, ask questions about it, and return the figures.

    `question_seconds` is the median time to an answer's first token.
    """
    length, name, entries, options = case
    cache = make_prompt_cache(model)
    mx.clear_cache()
    mx.reset_peak_memory()
    with watched(os.getpid()) as process_bytes:
        seconds, report = answer_prompt(model, random_prompt(length), cache, N_ANSWER, **options)
        disk_bytes_per_token = file_bytes(cache) / n_tokens(cache)
        questions = [random_prompt(QUESTION_TOKENS) for _ in range(N_QUESTIONS)]
        answers = [
            answer_prompt(model, question, cache, N_ANSWER, **options) for question in questions
        ]
    return {
        "context": length,
        "contender": name,
        "entries": entries,
        "read_seconds": report.prefill_seconds if options else seconds,
        "peak_bytes": mx.get_peak_memory(),
        "process_bytes": max(process_bytes),
        "kv_bytes": kv_bytes(cache),
        "disk_bytes_per_token": disk_bytes_per_token,
        "gathered": max(report.entries for _, report in answers),
        "question_seconds": statistics.median(seconds for seconds, _ in answers),
    }


def main() -> None:
    """Measure each case and add its row."""
    parser = result_options(__doc__, "books")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 65536, 262144])
    args = parser.parse_args()
    result, model = Result(args.out, model=RANDOM), make_random_model()
    for case in cases(args.lengths):
        result.add(measure(model, case))


if __name__ == "__main__":
    main()
