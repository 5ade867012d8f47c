"""Cutting a prefilled prompt cache down to a policy's rows."""

from __future__ import annotations

import math
import time

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from ..caches.answer import answer_cache
from ..caches.block import BlockKVCache
from ..caches.layers import AttentionLayer, attention_layers, members
from ..caches.offloaded import RestingKVCache
from ..caches.window import SnapKVCache
from ..entries.entries import Entries
from ..entries.quantization import Quantization, n_bytes
from ..entries.queries import Queries, Recorder
from ..entries.selection import has_nan, nan_scores
from ..errors import SnapKVError
from ..policies import Policy, Stages
from ..policies.budgets import Quota, smallest_for_mass
from .report import CompressionReport


def compress_prompt_cache(
    model,
    prompt_cache: list,
    policy: Policy,
    queries: list[mx.array | None] | None = None,
    quantization: Quantization | None = None,
) -> CompressionReport:
    """Replace the full KV caches of `prompt_cache` by compressed ones, in place.

    Args:
        model: the mlx-lm model that filled the cache.
        prompt_cache: one cache a layer; entries of linear and sliding-window layers stay as they are.
        policy: what to keep.
        queries: by layer, the post-RoPE queries `(B, n_heads, n, head_dim)` of the cache's last `n`
            tokens, for policies that vote; not needed for caches that recorded them.
        quantization: how the rows kept are to be quantised, if at all.

    Returns:
        The report; its `reason` says why if nothing was dropped.

    Raises:
        SnapKVError: a layer's queries are missing, or its scores are NaN; the cache is then as it was.
    """
    started = time.perf_counter()
    layers = attention_layers(model, prompt_cache)
    caches = [layer.cache_in(prompt_cache) for layer in layers]
    if any(isinstance(cache, SnapKVCache) for cache in caches):
        raise SnapKVError("this prompt cache is compressed already: give one that holds all rows")
    n_tokens = _common_length(caches)
    quotas = policy.quotas(n_tokens, len(layers))
    report = CompressionReport(str(policy), n_tokens)
    if policy.mass is None and all(size_of(c) <= q.rows for c, q in zip(caches, quotas)):
        report.reason = fits_reason(n_tokens, policy)
        return report
    if queries is not None and len(queries) != len(prompt_cache):
        raise SnapKVError(
            f"queries must have one entry for each of {len(prompt_cache)} layers, got {len(queries)}"
        )
    report.kv_bytes_before = sum(full_bytes(cache) for cache in caches)
    report.rows_kept = [None] * len(prompt_cache)
    report.mass_kept = [None] * len(prompt_cache)
    chosen = []
    for layer, cache, quota in zip(layers, caches, quotas):
        given = queries[layer.index] if queries is not None else None
        rows = _rows(layer, cache, given, policy.obs_window)
        positions, quota, report.mass_kept[layer.index] = _choose(rows, policy, quota)
        chosen.append((positions, quota))
    uniform = len({positions.shape[-1] for positions, _ in chosen}) == 1
    del caches, cache, rows
    # Nothing can fail from here on: full rows are given up layer by layer.
    for layer, (positions, quota) in zip(layers, chosen):
        cache = layer.cache_in(prompt_cache)
        kept = rows_held(cache).taken(positions)
        mx.eval(kept.stored_keys, kept.positions)
        mx.eval(kept.stored_values)
        kept = kept.packed(quantization or kept.quantization)
        small = answer_cache(layer.family, kept, cache.offset, policy, quota, uniform)
        del cache, kept
        layer.put(prompt_cache, small)
        report.rows_kept[layer.index] = small.size()
    mx.clear_cache()
    report.kv_bytes_after = kv_bytes(prompt_cache)
    report.selection_seconds = time.perf_counter() - started
    return report


def fits_reason(n_rows: int, policy: Policy | Stages) -> str:
    reading, _ = policy.stages
    parts = " (n_sink + top_k + n_window)" if reading.name == "snapkv" else ""
    return (
        f"the prompt's {n_rows} rows fit the budget of {reading.budget}{parts}; "
        "lower it to compress"
    )


def kv_bytes(prompt_cache: list) -> int:
    """Bytes of the keys and values in the caches that grow with the prompt: full, compressed or of a fixed budget."""
    total = 0
    for cache in members(prompt_cache):
        if isinstance(cache, (SnapKVCache, BlockKVCache, RestingKVCache)):
            total += cache.nbytes
        elif isinstance(cache, (KVCache, QuantizedKVCache)) and not cache.empty():
            total += sum(map(n_bytes, cache.keys_and_values()))
    return total


def size_of(cache) -> int:
    """Rows that a cache holds; mlx-lm's quantised one does not say."""
    return cache.offset if isinstance(cache, QuantizedKVCache) else cache.size()


def is_compressed(prompt_cache: list) -> bool:
    """Whether any layer's rows were chosen from, or are going to be."""
    kinds = (SnapKVCache, BlockKVCache)
    return any(isinstance(cache, kinds) for cache in members(prompt_cache))


def full_bytes(cache) -> int:
    """Bytes of all the tokens' rows, had none been dropped or quantised."""
    if isinstance(cache, RestingKVCache):
        return cache.offset * cache.row_bytes
    rows = rows_held(cache)
    return sum(cache.offset * x[:, :, :1].nbytes for x in (rows.keys, rows.values))


def rows_held(cache) -> Entries:
    """A full-attention layer's rows, in order of position, without queries."""
    if isinstance(cache, SnapKVCache):
        keys, values, positions = cache.in_order()
        return Entries(keys, values, given_positions=positions, quantization=cache.quantization)
    if isinstance(cache, BlockKVCache):
        return cache.rows(0)
    if isinstance(cache, QuantizedKVCache):
        how = Quantization(cache.bits, cache.group_size)
        keys, values = (tuple(parts) for parts in cache.keys_and_values())
        return Entries(keys, values, quantization=how)
    return Entries(*cache.keys_and_values())


def _common_length(caches: list) -> int:
    lengths = {c.offset for c in caches}
    if len(lengths) != 1:
        raise SnapKVError(f"all layers must hold the same tokens, got {sorted(lengths)} rows")
    return lengths.pop()


def _choose(rows: Entries, policy: Policy, quota: Quota) -> tuple[mx.array, Quota, float | None]:
    """Which rows to keep `(B, n_kv_heads, n)`, of what quota, and the share of the votes they received, if any."""
    scores = policy.score(rows)
    if has_nan(scores).item():
        raise nan_scores()
    votes = (
        rows.received if policy.accumulates_attention else rows.votes if policy.obs_window else None
    )
    if votes is None:
        chosen = quota.select(scores)
        mx.eval(chosen)
        return chosen, quota, None
    if policy.mass is not None:
        quota = smallest_for_mass(scores, votes, quota, policy.mass)
    chosen = quota.select(scores)
    kept = mx.take_along_axis(votes, chosen, axis=-1).sum() / votes.sum()
    mx.eval(chosen, kept)
    mass = float(kept.item())  # type: ignore[arg-type]
    if math.isnan(mass):
        raise SnapKVError(
            "the votes for the prompt's rows contain NaN: the model gave NaN attention"
        )
    return chosen, quota, mass


def _rows(layer: AttentionLayer, cache, queries: mx.array | None, n_queries: int = 0) -> Entries:
    """A layer's rows with the given queries, or those recorded, the last `n_queries` if they are many."""
    if isinstance(cache, BlockKVCache):
        return cache.rows(n_queries)
    rows = rows_held(cache)
    rows.layer = layer
    keys = rows.keys
    if queries is not None:
        _check_queries(queries, keys)
        asked = range(cache.offset - queries.shape[2], cache.offset)
        scale = layer.family.scale_of(layer.attention, keys.shape[3])
        sinks = layer.family.sinks_of(layer.attention)
    elif isinstance(cache, Recorder) and cache.n_queries:
        queries, asked = cache.queries, cache.query_positions
        scale, sinks = cache.scale, cache.sinks
    if queries is not None:
        heads = layer.family.grouped(queries, keys.shape[1])
        rows.observed = Queries(heads, asked, scale, sinks, asked.start)
    return rows


def _check_queries(queries: mx.array, keys: mx.array) -> None:
    B, H, T, D = keys.shape
    q = queries.shape
    if len(q) != 4 or q[0] != B or q[1] % H or q[3] != D or not 1 <= q[2] <= T:
        raise SnapKVError(
            f"queries must be (B={B}, a multiple of {H} heads, 1 to {T} tokens, head_dim={D}), got {q}"
        )
