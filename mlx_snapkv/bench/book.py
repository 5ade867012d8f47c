"""What a book costs: a long prompt read once, and then questions about it, one after the other."""

import statistics
import time
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..caches.layers import file_bytes, kv_bytes
from ..engine.generate import generate_step
from ..engine.report import CompressionReport
from ..engine.request import held_tokens
from ..policies import KeyDiff, SnapKV, Stages
from .contenders import Contender
from .own_memory import OwnMemory
from .requests import ANSWER, random_prompt

READS = KeyDiff(budget=2048, block=512)
VOTES = SnapKV(top_k=1024, n_sink=128, n_window=512, lookahead=0)
QUESTION = 32  # tokens
ASKED = 3


def book_field(lengths: list[int]) -> list[tuple[int, Contender]]:
    """What is read, and how, in turn: the book at every length, everything else at the first one and below it.

    The full cache comes last: where only the most that a process ever held can be told, it says nothing about others.
    """
    stages = Stages(READS, VOTES)
    book = {"policy": stages, "memory": "recall:file"}
    resident = READS.quotas(0, 1)[0].entries
    found = [(n, Contender("book", "book", resident, book)) for n in lengths]
    for n in lengths[:1]:
        fewer = {"policy": stages, "memory": "recall:file:4bit"}
        found.append((n, Contender("book, 4 bits", "book 4", resident, fewer)))
        whole = {"policy": VOTES, "memory": "recall:file"}
        found.append((n, Contender("read in full, file", "recall", n, whole)))
        found += [(n // p, Contender("full cache", "full", n // p)) for p in (4, 2, 1)]
    return found


def measure_book(model, length: int, contender: Contender) -> dict[str, Any]:
    """One record: reading a prompt of random tokens, and the medians of the questions that follow it.

    A question's seconds are those until its answer's first token.
    """
    cache = make_prompt_cache(model)
    memory = OwnMemory()
    mx.clear_cache()
    mx.reset_peak_memory()
    with memory.watched():
        seconds, report = _asked(model, length, cache, contender)
        reading = report.prefill_seconds if report.book else seconds
        disk = file_bytes(cache) / held_tokens(model, cache)
        asked = [_asked(model, QUESTION, cache, contender) for _ in range(ASKED)]
    figures = {
        "read_seconds": reading,
        "tokens_per_second": length / reading,
        "peak_bytes": mx.get_peak_memory(),
        "own_bytes": memory.most,
        "kv_bytes": kv_bytes(cache),
        "disk_bytes_per_token": disk,
        "gathered": max(report.entries for _, report in asked),
        "question_seconds": statistics.median(seconds for seconds, _ in asked),
    }
    books = [report.book for _, report in asked if report.book]
    if books:
        for part in ("vote_seconds", "gather_seconds", "read_again_seconds"):
            figures[part] = statistics.median(getattr(book, part) for book in books)
    return contender.record(length, **figures)


def _asked(
    model, n_tokens: int, cache: list, contender: Contender
) -> tuple[float, CompressionReport]:
    """Seconds until the first token of an answer to so many tokens more, and the report."""
    reports: list[CompressionReport] = []
    prompt = random_prompt(n_tokens)
    wanted = {"prompt_cache": cache, "max_tokens": ANSWER, **contender.options}
    started = time.perf_counter()
    steps = generate_step(prompt, model, on_report=reports.append, **wanted)
    next(steps)
    seconds = time.perf_counter() - started
    for _ in steps:
        pass
    return seconds, reports[0]
