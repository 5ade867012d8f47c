"""Measure batches of prompts, with mlx-lm's full caches and with compressed caches.

python scripts/measure_batches.py                    # writes docs/batches.json; then: make docs
"""

import contextlib
import statistics
import time
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache
from results_page import Result, Row, result_options

from mlx_snapkv import CompressedBatchGenerator
from mlx_snapkv.cli.loading import load_model
from mlx_snapkv.compress.options import Compress
from mlx_snapkv.compress.policies import SnapKV
from mlx_snapkv.measure.contenders import (
    Contender,
    decoding_cache,
    full_and_policies,
    random_prompt,
)

ANSWER = 128  # tokens decoded after each prompt, mlx-lm's default
WARM_UP = 3  # steps before the measured ones


def generator(model, contender: Contender, batch: int) -> BatchGenerator:
    """Return a generator for `batch` prompts: mlx-lm's for the full cache, ours for a policy."""
    options = {"completion_batch_size": batch}
    if contender.policy is None:
        return BatchGenerator(model, **options)
    return CompressedBatchGenerator(model, reads_first=True, policy=contender.policy, **options)


def whole_run(model, length: int, batch: int, contender: Contender) -> Row:
    """Answer a batch of prompts. Return the total seconds, the seconds to each first token, and peak memory."""
    prompts: list[Any] = [random_prompt(length).tolist() for _ in range(batch)]
    caches = [make_prompt_cache(model) for _ in prompts]
    first_token_seconds: dict[int, float] = {}  # request id -> seconds
    mx.clear_cache()
    mx.reset_peak_memory()
    with contextlib.closing(generator(model, contender, batch)) as running:
        started = time.perf_counter()
        running.insert(prompts, [ANSWER] * batch, caches=caches)
        while responses := running.next_generated():
            for response in responses:
                first_token_seconds.setdefault(response.uid, time.perf_counter() - started)
        run_seconds = time.perf_counter() - started
    return {
        "run_seconds": run_seconds,
        "first_seconds": sorted(first_token_seconds.values()),
        "peak_bytes": mx.get_peak_memory(),
    }


def decoding_together(model, length: int, batch: int, contender: Contender, steps: int) -> Row:
    """Decode from a batch of random caches. Return tokens per second (from the median step) and KV bytes."""
    cache = decoding_cache(model, contender, length)
    max_tokens = 2 * batch + WARM_UP + steps  # no request may end during the measurement
    step_seconds: list[float] = []
    with contextlib.closing(generator(model, contender, batch)) as running:
        running.insert([[1]] * batch, [max_tokens] * batch, caches=[cache] * batch)
        while len(running.next_generated()) < batch:
            pass
        for _ in range(WARM_UP + steps):
            started = time.perf_counter()
            assert len(running.next_generated()) == batch
            step_seconds.append(time.perf_counter() - started)
        kv_bytes = running.prompt_cache_nbytes
    median_seconds = statistics.median(step_seconds[WARM_UP:])
    return {"tokens_per_second": batch / median_seconds, "kv_bytes": kv_bytes}


def main() -> None:
    """Measure each batch size with the full cache and with SnapKV, and add the rows."""
    parser = result_options(__doc__, "batches")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--length", type=int, default=8192, help="tokens of a prompt")
    parser.add_argument("--steps", type=int, default=50)
    args = parser.parse_args()
    model, _ = load_model(args.model)
    result = Result(args.out, model=args.model, length=args.length, answer=ANSWER)
    policy = Compress(SnapKV(budget="6.25%"))
    for batch in args.batches:
        for contender in full_and_policies(args.length, [policy]):
            row = {"batch": batch, "cache": contender.name, "entries": contender.entries}
            row |= decoding_together(model, args.length, batch, contender, args.steps)
            row |= whole_run(model, args.length, batch, contender)
            result.add(row)


if __name__ == "__main__":
    main()
