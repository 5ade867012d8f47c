"""Cutting a prefilled prompt cache down to a policy's rows."""

from __future__ import annotations

import math
import time

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from . import models
from .cache import SnapKVCache
from .capture import RecordingKVCache
from .errors import SnapKVError
from .models import AttentionLayer
from .policies import Policy
from .report import CompressionReport
from .selection import gather_rows, select_positions
from .votes import Rows


def compress_prompt_cache(
    model, prompt_cache: list, policy: Policy, queries: list[mx.array | None] | None = None
) -> CompressionReport:
    """Replace the full KV caches of `prompt_cache` by compressed ones, in place.

    Args:
        model: the mlx-lm model that filled the cache.
        prompt_cache: one cache a layer; entries of linear and sliding-window layers stay as they are.
        policy: what to keep.
        queries: by layer, the post-RoPE queries `(B, n_heads, n, head_dim)` of the cache's last `n`
            tokens, for policies that vote; not needed for caches that recorded them.

    Returns:
        The report; its `reason` says why if nothing was dropped.

    Raises:
        SnapKVError: a layer's queries are missing, or its scores are NaN; the cache is then as it was.
    """
    started = time.perf_counter()
    layers = models.attention_layers(model, prompt_cache)
    n_rows = _common_length([layer.cache_in(prompt_cache) for layer in layers])
    report = CompressionReport(str(policy), n_rows)
    if n_rows <= policy.budget:
        report.reason = fits_reason(n_rows, policy)
        return report
    if queries is not None and len(queries) != len(prompt_cache):
        raise SnapKVError(
            f"queries must have one entry for each of {len(prompt_cache)} layers, got {len(queries)}"
        )
    report.kv_bytes_before = kv_bytes(prompt_cache)
    report.rows_kept = [None] * len(prompt_cache)
    report.mass_kept = [None] * len(prompt_cache)
    chosen = []
    for layer in layers:
        given = queries[layer.index] if queries is not None else None
        positions, report.mass_kept[layer.index] = _choose(layer, prompt_cache, given, policy)
        chosen.append(positions)
    # Nothing can fail from here on: full rows are given up layer by layer.
    for layer, positions in zip(layers, chosen):
        kept = _cut(layer.cache_in(prompt_cache), positions, policy.n_window)
        layer.put(prompt_cache, kept)
        report.rows_kept[layer.index] = kept.size()
    mx.clear_cache()
    report.kv_bytes_after = kv_bytes(prompt_cache)
    report.selection_seconds = time.perf_counter() - started
    return report


def fits_reason(n_rows: int, policy: Policy) -> str:
    return (
        f"the prompt's {n_rows} rows fit the budget of {policy.budget} (n_sink + top_k + n_window); "
        "lower it to compress"
    )


def kv_bytes(prompt_cache: list) -> int:
    """Bytes of the rows in the caches that grow with the prompt: the KV caches, compressed or not."""
    caches = [c for c in models.members(prompt_cache) if isinstance(c, (KVCache, SnapKVCache))]
    return sum(rows.nbytes for c in caches if not c.empty() for rows in c.keys_and_values())


def _common_length(caches: list) -> int:
    lengths = {c.offset for c in caches}
    if len(lengths) != 1:
        raise SnapKVError(f"all layers must hold the same tokens, got {sorted(lengths)} rows")
    return lengths.pop()


def _choose(
    layer: AttentionLayer, prompt_cache: list, queries: mx.array | None, policy: Policy
) -> tuple[mx.array, float]:
    """Positions to keep `(B, n_kv_heads, n)`, and the share of the voters' attention they received."""
    rows = _rows(layer, layer.cache_in(prompt_cache), queries)
    positions = select_positions(
        policy.score(rows), n_sink=policy.n_sink, top_k=policy.top_k, n_window=policy.n_window
    )
    kept = mx.take_along_axis(rows.votes, positions, axis=-1).sum() / rows.votes.sum()
    mx.eval(positions, kept)
    mass = float(kept.item())  # type: ignore[arg-type]
    if math.isnan(mass):
        raise SnapKVError(
            "the votes for the prompt's rows contain NaN: the model gave NaN attention"
        )
    return positions, mass


def _rows(layer: AttentionLayer, cache, queries: mx.array | None) -> Rows:
    keys, values = cache.keys_and_values()
    if queries is not None:
        _check_queries(queries, keys)
        first = cache.offset - queries.shape[2]
        scale = layer.family.scale_of(layer.attention, keys.shape[3])
        sinks = layer.family.sinks_of(layer.attention)
    elif isinstance(cache, RecordingKVCache) and cache.n_queries:
        queries, first, scale, sinks = cache.queries, cache.first, cache.scale, cache.sinks
    else:
        raise SnapKVError(
            "a layer's queries are missing: pass queries=, or prefill with mlx_snapkv.prefill"
        )
    positions = first + mx.arange(queries.shape[2])
    queries = layer.family.grouped(queries, keys.shape[1])
    return Rows(keys, values, queries, positions, scale, sinks)


def _check_queries(queries: mx.array, keys: mx.array) -> None:
    B, H, T, D = keys.shape
    q = queries.shape
    if len(q) != 4 or q[0] != B or q[1] % H or q[3] != D or not 1 <= q[2] <= T:
        raise SnapKVError(
            f"queries must be (B={B}, a multiple of {H} heads, 1 to {T} tokens, head_dim={D}), got {q}"
        )


def _cut(cache, positions: mx.array, n_window: int) -> SnapKVCache:
    keys, values = (gather_rows(rows, positions) for rows in cache.keys_and_values())
    pinned = positions[..., : positions.shape[-1] - n_window]
    kept = SnapKVCache(keys, values, mx.contiguous(pinned), offset=cache.offset, n_window=n_window)
    mx.eval(kept.state)
    return kept
