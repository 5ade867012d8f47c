"""Prompt-cache compression: score the entries of each layer and replace its full cache with a compressed one."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..caches.layers import (
    AttentionLayer,
    attention_layers,
    file_bytes,
    is_compressed,
    kv_bytes,
    kv_dtype,
)
from ..compress.decode_cache import make_decode_cache
from ..compress.evicting import EvictingCache
from ..compress.options import Compress
from ..compress.policy import Policy
from ..compress.selection import select
from ..entries.attention import nan_scores_error
from ..entries.entries import Entries
from ..entries.quantization import Quantization, slice_rows
from ..entries.queries import Queries
from ..entries.quota import Quota
from ..errors import SnapKVError
from ..planning.config import CompressionConfig
from ..planning.request_plan import Plan, plan_compression
from ..planning.settings import resolve_compress
from .report import CompressionReport

# Called as `on_kept(layer, positions, votes)`. `positions` `(B, n_kv_heads, n)` are the positions of the layer's kept
# entries, in ascending order. `votes` has the same shape; it is None if nothing voted.
KeptCallback = Callable[[AttentionLayer, mx.array, mx.array | None], None]


def compress_prompt_cache(
    model,
    prompt_cache: list,
    policy: Policy | Compress | str,
    queries: list[mx.array | None] | None = None,
    quantization: Quantization | None = None,
) -> CompressionReport:
    """Compress the full KV caches in `prompt_cache` in place.

    Args:
        model: the mlx-lm model that filled the cache.
        prompt_cache: one full cache per layer.
        policy: a policy object, or a string such as "keydiff:budget=8192". If two policies are joined by " then ", only
            the second is used.
        queries: for each layer, the post-RoPE queries `(B, n_heads, n, head_dim)` of the last `n` tokens. The last
            `obs_window` of them vote. Required by policies that use votes, unless the caches recorded queries.
        quantization: quantisation of the kept entries. None leaves it unchanged.

    Returns: The report. If nothing was evicted, `reason` says why.

    Raises:
        SnapKVError: the cache is already compressed, queries are missing, or scores are NaN. The cache is unchanged.
    """
    compress = resolve_compress(policy=policy)
    if compress is None:
        raise SnapKVError("compress_prompt_cache needs a policy, such as SnapKV(top_k=4096)")
    layers = attention_layers(model, prompt_cache)
    if is_compressed([layer.cache_in(prompt_cache) for layer in layers]):
        raise SnapKVError("this prompt cache is already compressed: give one with all entries")
    if queries is not None and len(queries) != len(prompt_cache):
        raise SnapKVError(
            f"queries must have one item for each of {len(prompt_cache)} layers, got {len(queries)}"
        )
    lengths = {layer.layer_cache_in(prompt_cache).offset for layer in layers}
    if len(lengths) != 1:
        raise SnapKVError(
            f"all layers must hold equally many tokens, got {sorted(lengths)} entries"
        )
    n = lengths.pop()
    report = CompressionReport(str(compress), n)
    config = CompressionConfig(compress, quantization=quantization)
    config.require_supported(model)
    plan = plan_compression(config, n)
    if plan.is_left_to_mlx_lm:
        report.reason = plan.reason
        return report
    with measuring(plan, layers, prompt_cache, prompt_cache, report):
        choices = [choose_entries(layer, prompt_cache, plan, queries) for layer in layers]
        note_choices(choices, layers, prompt_cache, report)
        for layer, choice in zip(layers, choices):
            put_compressed_cache(layer, prompt_cache, plan, choice)
            # Every layer still has its full cache in memory. Evaluate now, so that this layer's is freed before the
            # next layer is compressed.
            mx.eval(layer.cache_in(prompt_cache).state)
    return report


@contextlib.contextmanager
def measuring(
    plan: Plan,
    layers: list[AttentionLayer],
    prompt_cache: list,
    caches: list,
    report: CompressionReport,
) -> Iterator[None]:
    """Time the `with` block, and record the KV memory before and after it in `report`.

    Args:
        plan: the request's plan.
        layers: the model's full-attention layers.
        prompt_cache: with sparse attention, the caches that store all entries.
        caches: the prefill caches, which the block replaces in place.
        report: the report to update.
    """
    started = time.perf_counter()
    report.kv_bytes_before = sum(layer.layer_cache_in(caches).full_nbytes for layer in layers)
    yield
    mx.clear_cache()
    note_memory(plan, layers, prompt_cache, caches, report)
    report.selection_seconds += time.perf_counter() - started


def note_memory(
    plan: Plan,
    layers: list[AttentionLayer],
    prompt_cache: list,
    caches: list,
    report: CompressionReport,
) -> None:
    """Record how many KV bytes an answer token reads, and how many stay unread."""
    if plan.sparse is not None:
        kept = [layer.cache_in(prompt_cache) for layer in layers]
        report.kv_bytes_staying = sum(cache.kv_nbytes for cache in kept)
        # Every token reads the index, so it does not count as unread.
        report.kv_bytes_staying -= sum(cache.index_nbytes for cache in kept)
        report.file_bytes = file_bytes(prompt_cache)
    elif plan.decode_policy.schedule == "block":
        report.block = plan.decode_policy.block
    report.kv_bytes_after = kv_bytes(caches) + report.kv_bytes_staying
    report.kv_dtype = kv_dtype(layers[0].layer_cache_in(caches))


def note_choices(
    choices: list[Choice], layers: list[AttentionLayer], caches: list, report: CompressionReport
) -> None:
    """Record how many entries each layer keeps, and what share of the votes they received.

    Blocks until the device has computed all choices.

    Raises: SnapKVError: scores are NaN.
    """
    shares: Any = mx.stack([choice.share for choice in choices]).tolist()
    if any(map(math.isnan, shares)):
        raise nan_scores_error()
    report.entries_kept = [None] * len(caches)
    report.attention_share = [None] * len(caches)
    for layer, choice, share in zip(layers, choices, shares):
        report.entries_kept[layer.index] = choice.kept.shape[-1]
        report.attention_share[layer.index] = None if choice.votes is None else share


def choose_entries(
    layer: AttentionLayer,
    caches: list,
    plan: Plan,
    queries: list[mx.array | None] | None = None,
) -> Choice:
    """Choose which entries of a layer to keep, without changing the layer's cache.

    Args:
        layer: the layer.
        caches: the prefill caches.
        plan: the request's plan.
        queries: see `compress_prompt_cache`.
    """
    entries, _ = split_entries(layer, caches, plan, queries)
    return choose(entries, plan.decode_policy, plan.decode_quota)


def split_entries(
    layer: AttentionLayer,
    caches: list,
    plan: Plan,
    queries: list[mx.array | None] | None = None,
) -> tuple[Entries, Entries]:
    """Split a layer's entries into prompt entries, which the policy scores, and entries of answer tokens."""
    cache = layer.layer_cache_in(caches)
    obs_window = plan.decode_policy.obs_window
    entries = cache.held(plan.n_voters if obs_window else 0)
    entries.layer = layer
    layer_queries = None if queries is None else queries[layer.index]
    if layer_queries is not None:
        entries.voting_queries = _as_voters(layer, layer_queries, entries, cache.offset, obs_window)
    n = len(entries) - (cache.offset - plan.n_prompt)
    return entries.between(0, n), entries.between(n, len(entries))


def _as_voters(
    layer: AttentionLayer, queries: mx.array, entries: Entries, stop: int, obs_window: int
) -> Queries:
    """Wrap the last `obs_window` queries as voters. `stop` is the position after the last query."""
    B, H, T, D = entries.keys.shape
    q = queries.shape
    n_heads = H * len(layer.readers)
    if len(q) != 4 or q[0] != B or q[1] % n_heads or q[3] != D or not 1 <= q[2] <= T:
        raise SnapKVError(
            f"queries must be (B={B}, a multiple of {n_heads} heads, 1 to {T} tokens, head_dim={D}), got {q}"
        )
    n = min(q[2], obs_window or q[2])
    return Queries(
        layer.group_heads(queries[:, :, -n:], H),
        range(len(entries) - n, len(entries)),
        layer.family.scale_of(layer.attention, D),
        layer.family.sinks_of(layer.attention),
        start=stop - n,
        logit_cap=layer.logit_cap,
    )


def put_compressed_cache(
    layer: AttentionLayer,
    caches: list,
    plan: Plan,
    choice: Choice,
    on_kept: KeptCallback | None = None,
) -> None:
    """Replace a layer's cache with a cache of the chosen entries.

    The full cache is freed once the device has copied the chosen entries, unless the caller holds a reference to it.
    """
    layer.put(caches, _compressed_cache(layer, caches, plan, choice, on_kept))


def _compressed_cache(
    layer: AttentionLayer,
    full: list,
    plan: Plan,
    choice: Choice,
    on_kept: KeptCallback | None,
) -> EvictingCache:
    """Build a cache with the chosen prompt entries and all entries of answer tokens."""
    before = layer.cache_in(full)
    policy = plan.decode_policy
    entries, later = split_entries(layer, full, plan)
    kept, later = (
        x.with_quantization(plan.config.quantization or x.quantization)
        for x in (entries.take(choice.kept), later)
    )
    mx.async_eval(kept.stored_keys, kept.positions, kept.received_attention, later.stored_keys)
    mx.async_eval(kept.stored_values, later.stored_values)  # after the keys, to lower peak memory
    entries.release()
    if on_kept is not None:
        on_kept(layer, kept.positions, choice.votes)
    small = make_decode_cache(layer, kept, plan.n_prompt, policy, plan.decode_quota)
    del entries, kept
    voters = before if policy.observes_answer else None
    small.inherit_queries(voters)
    for i in range(0 if plan.config.is_text else len(later)):
        small.append(*slice_rows((later.stored_keys, later.stored_values), i, i + 1))
        small.inherit_queries(voters)
    mx.async_eval(small.state)
    return small


@dataclass
class Choice:
    """The entries that a policy keeps in one layer.

    Attributes:
        kept: indices of the kept entries, `(B, n_kv_heads, n)`.
        votes: votes for the kept entries, `(B, n_kv_heads, n)`, or None if nothing voted.
        share: fraction of all votes that went to the kept entries, a float32 scalar. It is 1 if nothing voted, and NaN
            if any score is NaN.
    """

    kept: mx.array
    votes: mx.array | None
    share: mx.array


def choose(entries: Entries, policy: Policy, quota: Quota) -> Choice:
    """Score a layer's entries, choose as many as `quota` allows, and release `entries`.

    The result is evaluated asynchronously.
    """
    entries.budget = quota.entries
    entries.n_window = quota.n_window
    # Compute the scores first: a policy may compute scores and votes in the same pass.
    scores = policy.score(entries)
    votes = entries.votes if policy.obs_window else None
    if policy.accumulates_attention:
        votes = entries.received_attention
    entries.release()
    kept = select(scores, quota)
    share = mx.array(1.0)
    kept_votes = None
    if votes is not None:
        kept_votes = mx.take_along_axis(votes, kept, axis=-1)
        share = kept_votes.sum() / votes.sum()
    share = mx.where(mx.any(mx.isnan(scores)), math.nan, share)
    mx.async_eval(kept, kept_votes, share)
    return Choice(kept, kept_votes, share)
