"""Prompt-cache compression: score the entries of each layer and replace its full cache with a compressed one."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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

# Called as `on_kept(layer, positions, votes)`. `positions` lists the positions of the layer's kept entries in ascending
# order and has shape `(B, n_kv_heads, n)`. `votes` has the same shape, or is None if nothing voted.
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
        quantization: quantisation of the kept entries. By default, they stay as they are.

    Returns: The report. If nothing was evicted, `reason` says why.

    Raises:
        SnapKVError: the policy is invalid, the model is not supported, the cache is already compressed, its layers hold
            different numbers of tokens, queries are missing or have the wrong shape, or scores are NaN. In all of these
            cases, the cache stays unchanged.
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
        raise SnapKVError(f"all layers must hold the same number of tokens, got {sorted(lengths)}")
    (n_prompt,) = lengths
    report = CompressionReport(str(compress), n_prompt)
    config = CompressionConfig(compress, quantization=quantization)
    config.require_supported(model)
    plan = plan_compression(config, n_prompt)
    if plan.is_left_to_mlx_lm:
        report.reason = plan.reason
        return report
    with measuring_compression(plan, layers, prompt_cache, prompt_cache, report):
        choices = [choose_entries(layer, prompt_cache, plan, queries) for layer in layers]
        note_choices(choices, layers, prompt_cache, report)
        for layer, choice in zip(layers, choices):
            put_compressed_cache(layer, prompt_cache, plan, choice)
            # Evaluate now to free this layer's full cache before the next layer is compressed.
            mx.eval(layer.cache_in(prompt_cache).state)
    return report


@contextlib.contextmanager
def measuring_compression(
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
        prompt_cache: the caches that store all entries. Only used with sparse attention.
        caches: a list of the prefill caches. The `with` block replaces its elements.
        report: the report to update.
    """
    started = time.perf_counter()
    report.kv_bytes_before = sum(layer.layer_cache_in(caches).full_nbytes for layer in layers)
    yield
    mx.clear_cache()
    _note_memory(plan, layers, prompt_cache, caches, report)
    report.selection_seconds += time.perf_counter() - started


def _note_memory(
    plan: Plan,
    layers: list[AttentionLayer],
    prompt_cache: list,
    caches: list,
    report: CompressionReport,
) -> None:
    """Record the dtype and size of the entries after compression.

    With sparse attention, also record how much is in files, and how much is in memory but not read by an answer token.
    If the answer evicts in blocks, record the block size.
    """
    if plan.sparse is not None:
        stored_caches = [layer.cache_in(prompt_cache) for layer in layers]
        report.kv_bytes_staying = sum(cache.kv_nbytes for cache in stored_caches)
        # Every token reads the index, so it does not count as unread.
        report.kv_bytes_staying -= sum(cache.index_nbytes for cache in stored_caches)
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
    shares: Any = mx.stack([choice.vote_share for choice in choices]).tolist()
    if any(map(math.isnan, shares)):
        raise nan_scores_error()
    report.entries_kept = [None] * len(caches)
    report.attention_share = [None] * len(caches)
    for layer, choice, share in zip(layers, choices, shares):
        report.entries_kept[layer.index] = choice.kept_indices.shape[-1]
        report.attention_share[layer.index] = None if choice.kept_votes is None else share


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
    prompt_entries, _ = _split_entries(layer, caches, plan, queries)
    return _score_and_select(prompt_entries, plan.decode_policy, plan.decode_quota)


def _split_entries(
    layer: AttentionLayer,
    caches: list,
    plan: Plan,
    queries: list[mx.array | None] | None = None,
) -> tuple[Entries, Entries]:
    """Return the layer's prompt entries, which the policy scores, and its answer entries."""
    cache = layer.layer_cache_in(caches)
    entries = cache.held()
    entries.layer = layer
    layer_queries = None if queries is None else queries[layer.index]
    if layer_queries is not None:
        obs_window = plan.decode_policy.obs_window
        entries.voting_queries = _as_voters(layer, layer_queries, entries, cache.offset, obs_window)
    elif entries.voting_queries is not None and plan.voters:
        entries.voting_queries = entries.voting_queries.latest(len(plan.voters))
    n_answer_entries = cache.offset - plan.n_prompt
    n_prompt_entries = len(entries) - n_answer_entries
    return entries.between(0, n_prompt_entries), entries.between(n_prompt_entries, len(entries))


def _as_voters(
    layer: AttentionLayer, queries: mx.array, entries: Entries, end_position: int, obs_window: int
) -> Queries:
    """Wrap the last `obs_window` queries as voters, or all queries if `obs_window` is 0.

    `end_position` is the position after the last query.

    Raises: SnapKVError: the queries have the wrong shape.
    """
    B, n_kv_heads, T, head_dim = entries.keys.shape
    n_heads = n_kv_heads * len(layer.readers)
    if not _is_query_shape(queries.shape, B, n_heads, T, head_dim):
        raise SnapKVError(
            f"queries must be (B={B}, a multiple of {n_heads} heads, 1 to {T} tokens, head_dim={head_dim}), got "
            f"{queries.shape}"
        )
    n_queries = queries.shape[2]
    n_voters = min(n_queries, obs_window or n_queries)
    return Queries(
        layer.group_heads(queries[:, :, -n_voters:], n_kv_heads),
        range(len(entries) - n_voters, len(entries)),
        layer.family.scale_of(layer.attention, head_dim),
        layer.family.sinks_of(layer.attention),
        start=end_position - n_voters,
        logit_cap=layer.logit_cap,
    )


def _is_query_shape(
    shape: tuple[int, ...], B: int, n_heads: int, max_queries: int, head_dim: int
) -> bool:
    """Return whether a shape is `(B, a multiple of n_heads, 1 to max_queries, head_dim)`."""
    if len(shape) != 4:
        return False
    batch_size, n_query_heads, n_queries, query_dim = shape
    if batch_size != B or query_dim != head_dim:
        return False
    return n_query_heads % n_heads == 0 and 1 <= n_queries <= max_queries


def put_compressed_cache(
    layer: AttentionLayer,
    caches: list,
    plan: Plan,
    choice: Choice,
    on_kept: KeptCallback | None = None,
) -> None:
    """Replace a layer's cache with one that holds the chosen prompt entries, followed by any answer entries.

    If the prompt is a text to ask about later, the answer entries are dropped.

    The full cache is freed once the device has copied the chosen entries, unless the caller holds a reference to it.
    """
    prefill_cache = layer.cache_in(caches)
    policy = plan.decode_policy
    prompt_entries, answer_entries = _split_entries(layer, caches, plan)
    kept_entries = _quantized(prompt_entries.take(choice.kept_indices), plan)
    answer_entries = _quantized(answer_entries, plan)
    earlier_turn_evicted = plan.n_earlier > 0 and len(prompt_entries) < plan.n_prompt
    mx.async_eval(
        kept_entries.stored_keys,
        kept_entries.positions,
        kept_entries.received_attention,
        answer_entries.stored_keys,
    )
    # Evaluate values after keys, to lower peak memory.
    mx.async_eval(kept_entries.stored_values, answer_entries.stored_values)
    prompt_entries.release()
    if on_kept is not None:
        on_kept(layer, kept_entries.positions, choice.kept_votes)
    quota = plan.decode_quota
    if earlier_turn_evicted and policy.keeps_shape:
        n_newest = _n_newest(kept_entries.positions, plan.n_prompt)
        quota = replace(quota, n_window=min(quota.n_window, n_newest))
    decode_cache = make_decode_cache(layer, kept_entries, plan.n_prompt, policy, quota)
    del prompt_entries, kept_entries
    evicts_with_queries = policy.schedule == "block" and policy.observes
    query_source = prefill_cache if evicts_with_queries else None
    decode_cache.inherit_queries(query_source)
    # A text to ask about later has no answer yet: any tokens decoded after it were only needed for their votes.
    n_to_append = 0 if plan.config.is_text else len(answer_entries)
    answer_rows = answer_entries.stored_keys, answer_entries.stored_values
    for i in range(n_to_append):
        decode_cache.append(*slice_rows(answer_rows, i, i + 1))
        decode_cache.inherit_queries(query_source)
    mx.async_eval(decode_cache.state)
    layer.put(caches, decode_cache)


def _n_newest(positions: mx.array, n_prompt: int) -> int:
    """Return how many of a prompt's last tokens have entries, without a gap.

    An earlier turn may have evicted entries that belong to this turn's larger window.

    Args:
        positions: positions of the entries in ascending order, `(B, n_kv_heads, n)`.
        n_prompt: number of tokens read, including earlier turns.
    """
    n = positions.shape[-1]
    is_kept = mx.all(positions == mx.arange(n_prompt - n, n_prompt), axis=(0, 1))
    # Going backwards, the product stays 1 until the first gap.
    n_newest: Any = mx.cumprod(is_kept[::-1].astype(mx.int32)).sum().item()
    return n_newest


def _quantized(entries: Entries, plan: Plan) -> Entries:
    """Quantise entries as configured. By default, they stay as they are."""
    return entries.with_quantization(plan.config.quantization or entries.quantization)


@dataclass
class Choice:
    """The entries that a policy keeps in one layer.

    Attributes:
        kept_indices: indices of the kept entries, `(B, n_kv_heads, n)`.
        kept_votes: votes for the kept entries, `(B, n_kv_heads, n)`, or None if nothing voted.
        vote_share: fraction of all votes that went to the kept entries, a float32 scalar. It is 1 if nothing voted, and
            NaN if any score is NaN.
    """

    kept_indices: mx.array
    kept_votes: mx.array | None
    vote_share: mx.array


def _score_and_select(entries: Entries, policy: Policy, quota: Quota) -> Choice:
    """Score a layer's entries, choose as many as `quota` allows, and release `entries`.

    The result is evaluated asynchronously.
    """
    entries.quota = quota
    # Compute the scores first: some policies also compute the votes in the same pass, and `entries` caches them.
    scores = policy.score(entries)
    votes = entries.votes if policy.obs_window else None
    if policy.accumulates_attention:
        votes = entries.received_attention
    entries.release()
    kept_indices = select(scores, quota)
    kept_votes = None
    vote_share = mx.array(1.0)
    if votes is not None:
        kept_votes = mx.take_along_axis(votes, kept_indices, axis=-1)
        vote_share = kept_votes.sum() / votes.sum()
    vote_share = mx.where(mx.any(mx.isnan(scores)), math.nan, vote_share)
    mx.async_eval(kept_indices, kept_votes, vote_share)
    return Choice(kept_indices, kept_votes, vote_share)
