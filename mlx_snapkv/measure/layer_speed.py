"""Estimate decoding speed without weights, by timing one layer's attention on random entries."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..caches.layers import AttentionLayer, attention_layers, sparse_layers, token_caches
from ..engine.report import CompressionReport
from ..engine.sparse_mode import SparseMode
from ..entries.queries import CapturedQueries
from ..errors import SnapKVError
from ..models.counts import n_query_heads
from ..planning.break_even import BreakEven, break_evens
from ..planning.config import CompressionConfig
from ..planning.request_plan import plan_request
from ..planning.scores import on_gpu
from ..planning.speed_record import DECODE_FULL, DECODE_SPARSE, Measurement, Speed, speed_of
from ..sparse.options import N_VOTERS, Sparse
from ..sparse.prompt_caches import make_caches

FAILURES = SnapKVError, RuntimeError, ValueError  # MLX raises one of these if memory is short
LENGTHS = (8192, 32_768)  # numbers of entries
# Number of tokens evaluated together, which keeps the device as busy as a pipelined loop does.
TOGETHER = 8


def sparse_pays(model: Any) -> dict[str, BreakEven]:
    """Return the lengths from which sparse prefill and sparse decoding are faster on this machine.

    On a GPU, missing measurements are estimated. On a CPU, an estimate would take too long.

    Args:
        model: an mlx-lm model, whose weights may be uninitialised.
    """
    sparse = Sparse()
    speed = speed_of(model, sparse)
    estimate = Speed()
    if on_gpu() and not {DECODE_FULL, DECODE_SPARSE} <= speed.lines.keys():
        with contextlib.suppress(*FAILURES):
            estimate = layer_speed(model, sparse)
    return break_evens(speed, estimate)


def layer_speed(model: Any, sparse: Sparse) -> Speed:
    """Estimate a token's attention time over all layers, with all entries and with few.

    Only the difference is meaningful for a whole token, because the rest of the model is not timed.

    Args:
        model: an mlx-lm model, whose weights may be uninitialised.
        sparse: sparse attention options.

    Raises: SnapKVError: the model does not support sparse attention.
    """
    config = CompressionConfig(replace(sparse, read="dense"))  # no prompt is read
    config.require_supported(model)
    layers = sparse_layers(attention_layers(model, make_caches(model, Sparse())))
    found: list[Measurement] = []
    for n in LENGTHS:
        times = _token_seconds(model, config, layers[0], n)
        found += [Measurement(kind, n, len(layers) * seconds) for kind, seconds in times.items()]
    return Speed().with_measurements(found)


def _token_seconds(
    model: Any, config: CompressionConfig, layer: AttentionLayer, n: int
) -> dict[str, float]:
    """Time one token's attention to `n` random entries in one layer. Return the seconds by kind."""
    plan = plan_request(model, config, n)
    keys, values = layer.cache_in(token_caches(model)).keys_and_values()
    n_heads = n_query_heads(layer.attention)
    scale = keys.shape[3] ** -0.5

    def random(n_heads: int, n: int, like: mx.array) -> mx.array:
        return mx.random.normal((1, n_heads, n, like.shape[3])).astype(like.dtype)

    entries = random(keys.shape[1], n, keys), random(values.shape[1], n, values)
    new = [random(x.shape[1], 1, x) for x in (keys, values)]
    query = random(n_heads, 1, keys)
    full = KVCache()
    full.update_and_fetch(*entries)

    def read_all() -> mx.array:
        return mx.fast.scaled_dot_product_attention(
            query, *full.update_and_fetch(*new), scale=scale
        )

    prompt_cache = make_caches(model, Sparse())
    stored = layer.cache_in(prompt_cache)
    stored.observe(plan.first_voter, plan.end_of_voters, plan.capacity)
    stored.update_and_fetch(*entries)
    stored.record(CapturedQueries(random(n_heads, N_VOTERS, keys), scale))
    caches = list(prompt_cache)
    report = CompressionReport(str(config.setting), n)
    SparseMode(model, plan, [layer], prompt_cache, None).compress(caches, report)  # type: ignore[arg-type]
    few = layer.cache_in(caches)

    def read_few() -> mx.array:
        return few.attend(query, *few.update_and_fetch(*new), scale, None)

    return {DECODE_FULL: _seconds(read_all), DECODE_SPARSE: _seconds(read_few)}


def _seconds(attend: Callable[[], mx.array]) -> float:
    """Return the seconds per call, from the faster of two runs after a warm-up run."""
    fastest = 0.0
    for run in range(3):
        started = time.perf_counter()
        mx.eval([attend() for _ in range(TOGETHER)])
        seconds = (time.perf_counter() - started) / TOGETHER
        fastest = min(fastest, seconds) if run > 1 else seconds
    return fastest
