"""What a book costs: a long prompt read once within a budget, and then questions about it, one after the other."""

import contextlib
import resource
import statistics
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import file_bytes, kv_bytes
from ..engine.request import held_tokens
from ..policies import KeyDiff, SnapKV, Stages
from .contenders import random_prompt
from .speed import ANSWER, Row, ask

READS = KeyDiff(budget=2048, block=512)
VOTES = SnapKV(top_k=1024, n_sink=128, n_window=512, lookahead=0)
QUESTION = 32  # tokens
ASKED = 3
STATUS = Path("/proc/self/status")
EVERY = 0.05  # seconds


def measure_books(
    model,
    lengths: list[int],
    start: Callable[[str, int], None],
    done: Callable[[list[Row]], None],
) -> list[Row]:
    """A row for the book at every length, and for everything else at the first one and below it.

    The full cache comes last: where only the most that a process ever held can be told, it says nothing about others.
    """
    stages, resident = Stages(READS, VOTES), READS.quotas(0, 1)[0].entries
    book = {"policy": stages, "memory": "recall:file"}
    field: list[tuple[int, str, int, dict[str, Any]]] = [
        (n, "book", resident, book) for n in lengths
    ]
    for n in lengths[:1]:
        fewer = {"policy": stages, "memory": "recall:file:4bit"}
        whole = {"policy": VOTES, "memory": "recall:file"}
        field += [(n, "book, 4 bits", resident, fewer), (n, "read in full, file", n, whole)]
        field += [(n // part, "full cache", n // part, {}) for part in (4, 2, 1)]
    rows: list[Row] = []
    start("books", len(field))
    for n, name, entries, options in field:
        row = {"context": n, "contender": name, "entries": entries}
        rows.append(row | measure_book(model, n, options))
        done(rows)
    return sorted(rows, key=lambda row: row["context"])


def measure_book(model, length: int, options: dict[str, Any]) -> dict[str, Any]:
    """Figures of reading a prompt of random tokens, and the medians of the questions that follow it.

    A question's seconds are those until its answer's first token.
    """
    cache = make_prompt_cache(model)
    mx.clear_cache()
    mx.reset_peak_memory()
    with process_memory() as most:
        seconds, report = ask(model, random_prompt(length), cache, ANSWER, **options)
        reading = report.prefill_seconds if report.book else seconds
        disk = file_bytes(cache) / held_tokens(model, cache)
        asked = [
            ask(model, random_prompt(QUESTION), cache, ANSWER, **options) for _ in range(ASKED)
        ]
    figures = {
        "read_seconds": reading,
        "peak_bytes": mx.get_peak_memory(),
        "process_bytes": most(),
        "kv_bytes": kv_bytes(cache),
        "disk_bytes_per_token": disk,
        "gathered": max(report.entries for _, report in asked),
        "question_seconds": statistics.median(seconds for seconds, _ in asked),
    }
    books = [report.book for _, report in asked if report.book]
    if books:
        for part in ("vote_seconds", "gather_seconds", "read_again_seconds"):
            figures[part] = statistics.median(getattr(book, part) for book in books)
    return figures


@contextlib.contextmanager
def process_memory() -> Iterator[Callable[[], int]]:
    """A function that tells the most bytes that the process itself has held while the block runs.

    On Linux that is anonymous memory, looked up now and then. Elsewhere it is what the system counts, the most since
    the process began, and file pages may be part of it.
    """
    seen, over = [_own_bytes()], threading.Event()

    def watch() -> None:
        while not over.wait(EVERY):
            seen[0] = max(seen[0], _own_bytes())

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield lambda: max(seen[0], _own_bytes())
    finally:
        over.set()
        watcher.join()


def _own_bytes() -> int:
    if STATUS.exists():
        (line,) = (x for x in STATUS.read_text().splitlines() if x.startswith("RssAnon:"))
        return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
