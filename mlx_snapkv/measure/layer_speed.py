"""Estimate decoding speed without weights, by timing one layer's attention on random entries."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..caches.adapter import full_cache
from ..caches.layers import AttentionLayer, attention_layers, sparse_layers, token_caches
from ..entries.entries import Entries
from ..errors import SnapKVError
from ..models.counts import n_query_heads
from ..planning.break_even import BreakEven, break_even
from ..planning.config import CompressionConfig
from ..planning.scores import on_gpu
from ..planning.speed_record import DECODE_FULL, DECODE_SPARSE, Measurement, Speed, speed_of
from ..sparse.options import Sparse
from .contenders import make_sparse_cache, random_like

LENGTHS = (8192, 32_768)  # numbers of cached entries to measure with
# Number of tokens to evaluate together, to keep the device as busy as a pipelined loop would.
TOKENS_PER_EVALUATION = 8


def sparse_pays(model: Any) -> BreakEven:
    """Return the length from which sparse decoding is faster than the full cache.

    The speeds come from this machine's speed record. If it lacks the speed of full or sparse decoding, both speeds are
    estimated by timing a layer, but only on a GPU. On a CPU, this would take too long.

    Args:
        model: an mlx-lm model. Its weights need not be loaded.
    """
    speed = speed_of(model, Sparse())
    estimate = Speed()
    if on_gpu() and not {DECODE_FULL, DECODE_SPARSE} <= speed.lines.keys():
        # Fails if the model does not support sparse attention, or if memory runs out.
        with contextlib.suppress(SnapKVError, RuntimeError, ValueError):
            estimate = layer_speed(model)
    return break_even(speed, estimate)


def layer_speed(model: Any) -> Speed:
    """Estimate the time of one token's full and sparse attention, over all layers that support sparse attention.

    A whole token takes longer, because the rest of the model is not timed. The difference between the two times also
    applies to a whole token.

    Args:
        model: an mlx-lm model. Its weights need not be loaded.

    Raises: SnapKVError: the model does not support sparse attention.
    """
    CompressionConfig(Sparse()).require_supported(model)
    layers = sparse_layers(attention_layers(model, make_prompt_cache(model)))
    measurements: list[Measurement] = []
    for n_entries in LENGTHS:
        seconds_by_kind = _layer_seconds(model, layers[0], n_entries)
        for kind, layer_seconds in seconds_by_kind.items():
            measurements.append(Measurement(kind, n_entries, len(layers) * layer_seconds))
    return Speed().with_measurements(measurements)


def _layer_seconds(model: Any, layer: AttentionLayer, n_entries: int) -> dict[str, float]:
    """Time one token's attention to `n_entries` random entries in one layer.

    Return the seconds by kind of measurement: `DECODE_FULL` and `DECODE_SPARSE`.
    """
    token_keys, token_values = layer.cache_in(token_caches(model)).keys_and_values()
    entries = Entries(random_like(token_keys, n_entries), random_like(token_values, n_entries))
    new_entry = random_like(token_keys, 1), random_like(token_values, 1)
    query = random_like(token_keys, 1, n_query_heads(layer.attention))
    scale = token_keys.shape[3] ** -0.5
    all_entries_cache = full_cache(entries)
    sparse_cache = make_sparse_cache(Sparse(), layer, entries, n_entries)

    def read_full() -> mx.array:
        return mx.fast.scaled_dot_product_attention(
            query, *all_entries_cache.update_and_fetch(*new_entry), scale=scale
        )

    def read_sparse() -> mx.array:
        return sparse_cache.attend(query, *sparse_cache.update_and_fetch(*new_entry), scale, None)

    return {
        DECODE_FULL: _seconds_per_call(read_full),
        DECODE_SPARSE: _seconds_per_call(read_sparse),
    }


def _seconds_per_call(attend: Callable[[], mx.array]) -> float:
    """Return the seconds per call, from the faster of two runs after a warm-up run."""
    run_seconds = []
    for _ in range(3):
        started = time.perf_counter()
        mx.eval([attend() for _ in range(TOKENS_PER_EVALUATION)])
        run_seconds.append(time.perf_counter() - started)
    _, *seconds_after_warm_up = run_seconds
    return min(seconds_after_warm_up) / TOKENS_PER_EVALUATION
