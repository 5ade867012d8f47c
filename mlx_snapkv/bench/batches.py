"""Many prompts at once: mlx-lm's batches of full and of rotating caches, and ours of compressed ones."""

import contextlib
import statistics
import time
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator

from ..batch.generator import CompressedBatchGenerator
from ..policies import Policy
from .contenders import Contender, contenders, decoding_cache, request_cache
from .requests import random_prompt

ANSWER = 128  # tokens decoded after each prompt: mlx-lm's own default
KINDS = ("full", "rotating", "snapkv")
WARM_UP = 3


def batch_field(model, length: int, policy: Policy) -> list[Contender]:
    """Who answers prompts of so many tokens in batches."""
    return [c for c in contenders(model, length, policy) if c.kind in KINDS]


def measure_batch(
    model, length: int, batch: int, contender: Contender, steps: int
) -> dict[str, Any]:
    """One record: so many prompts given at once until all are answered, and steps in which all of them decode."""
    together = _decoding_together(model, length, batch, contender, steps)
    return contender.record(
        length, batch=batch, **together, **_whole_run(model, length, batch, contender)
    )


def _generator(model, contender: Contender, batch: int) -> BatchGenerator:
    options = {"completion_batch_size": batch, **contender.options}
    if contender.kind != "snapkv":
        return BatchGenerator(model, **options)
    return CompressedBatchGenerator(model, reads_first=True, **options)


def _whole_run(model, length: int, batch: int, contender: Contender) -> dict[str, Any]:
    """Seconds, `first_seconds` until each request's first token among them, and peak memory of answering prompts."""
    prompts: list[Any] = [random_prompt(length).tolist() for _ in range(batch)]
    caches = [request_cache(model, contender) for _ in prompts]
    first: dict[int, float] = {}
    mx.clear_cache()
    mx.reset_peak_memory()
    generator = _generator(model, contender, batch)
    with contextlib.closing(generator), generator.stats() as stats:
        started = time.perf_counter()
        generator.insert(prompts, [ANSWER] * batch, caches=caches)
        while responses := generator.next_generated():
            for response in responses:
                first.setdefault(response.uid, time.perf_counter() - started)
        seconds = time.perf_counter() - started
    return {
        "answer": ANSWER,
        "run_seconds": seconds,
        "first_seconds": sorted(first.values()),
        "run_tokens_per_second": stats.generation_tps,
        "peak_bytes": mx.get_peak_memory(),
    }


def _decoding_together(
    model, length: int, batch: int, contender: Contender, steps: int
) -> dict[str, Any]:
    """The median step of all requests, and the bytes of their arrays.

    Each goes on from random entries: only shapes matter for speed.
    """
    cache = decoding_cache(model, contender, length)
    limit = 2 * batch + WARM_UP + steps  # so that none ends before
    generator = _generator(model, contender, batch)
    seconds: list[float] = []
    with contextlib.closing(generator):
        generator.insert([[1]] * batch, [limit] * batch, caches=[cache] * batch)
        while len(generator.next_generated()) < batch:
            pass
        for _ in range(WARM_UP + steps):
            started = time.perf_counter()
            assert len(generator.next_generated()) == batch
            seconds.append(time.perf_counter() - started)
        kv_bytes = generator.prompt_cache_nbytes
    step = statistics.median(seconds[WARM_UP:])
    return {
        "steps": steps,
        "step_seconds": step,
        "tokens_per_second": batch / step,
        "kv_bytes": kv_bytes,
    }
