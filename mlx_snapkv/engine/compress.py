"""Choosing the entries that a policy keeps of a prompt, and replacing the full caches by caches of these entries."""

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
from ..compress.decode_cache import decode_cache
from ..compress.evicting import EvictingCache
from ..compress.options import Compress
from ..compress.policy import Policy
from ..compress.selection import select
from ..entries.attention import nan_scores
from ..entries.entries import Entries
from ..entries.quantization import Quantization, rows
from ..entries.queries import Queries
from ..entries.quota import Quota
from ..errors import SnapKVError
from ..planning.config import CompressionConfig
from ..planning.request_plan import Plan, plan_compression
from ..planning.settings import resolve_compress
from .report import CompressionReport

# Receives a layer, the positions `(B, n_kv_heads, n)` of the entries kept in it, in order, and their votes or None.
KeptCallback = Callable[[AttentionLayer, mx.array, mx.array | None], None]


def compress_prompt_cache(
    model,
    prompt_cache: list,
    policy: Policy | Compress | str,
    queries: list[mx.array | None] | None = None,
    quantization: Quantization | None = None,
) -> CompressionReport:
    """Replace the full KV caches of `prompt_cache`, which `model` has filled, by compressed ones, in place.

    Args:
        model: the mlx-lm model that filled the cache.
        prompt_cache: one cache per layer, with all entries.
        policy: a policy object, or a string such as "keydiff:budget=8192". Of two policies, the second chooses.
        queries: for each layer, the post-RoPE queries `(B, n_heads, n, head_dim)` of the cache's last `n` tokens; the
            last `obs_window` of them vote. Needed by policies that vote, unless the caches recorded queries.
        quantization: how the entries kept are quantised; None leaves them as they are.

    Returns: The report; its `reason` says why if nothing was dropped.

    Raises:
        SnapKVError: the cache is compressed already, queries are missing, or scores are NaN; the cache is as it was.
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
    lengths = {layer.entries_in(prompt_cache).offset for layer in layers}
    if len(lengths) != 1:
        raise SnapKVError(
            f"all layers must hold equally many tokens, got {sorted(lengths)} entries"
        )
    n = lengths.pop()
    report = CompressionReport(str(compress), n)
    config = CompressionConfig(compress, quantization=quantization)
    config.require(model)
    plan = plan_compression(config, n)
    if plan.reason is not None:
        report.reason = plan.reason
        return report
    with measured(plan, layers, prompt_cache, prompt_cache, report):
        choices = [choose_entries(layer, prompt_cache, plan, queries) for layer in layers]
        note_choices(choices, layers, prompt_cache, report)
        for layer, choice in zip(layers, choices):
            put_chosen(layer, prompt_cache, plan, choice)
            # The full entries of all layers are still in memory, so each layer's are freed before the next layer.
            mx.eval(layer.cache_in(prompt_cache).state)
    return report


@contextlib.contextmanager
def measured(
    plan: Plan,
    layers: list[AttentionLayer],
    prompt_cache: list,
    caches: list,
    report: CompressionReport,
) -> Iterator[None]:
    """Note in the report how long the block takes to replace `caches`, and their bytes before and after it.

    Args:
        plan: the request's plan.
        layers: the model's full-attention layers.
        prompt_cache: the caches that keep all entries under sparse attention.
        caches: the caches that the prompt was read on, which the block replaces by the answer's.
        report: the report to note the figures in.
    """
    started = time.perf_counter()
    report.kv_bytes_before = sum(layer.entries_in(caches).full_nbytes for layer in layers)
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
    """Note in the report the bytes that the answer reads from `caches`, and the bytes that stay unread."""
    if plan.sparse is not None:
        kept = [layer.cache_in(prompt_cache) for layer in layers]
        report.kv_bytes_staying = sum(cache.kv_nbytes for cache in kept)
        # Tokens read the index by which they choose.
        report.kv_bytes_staying -= sum(cache.index_nbytes for cache in kept)
        report.file_bytes = file_bytes(prompt_cache)
    elif plan.decode_policy.schedule == "block":
        report.block = plan.decode_policy.block
    report.kv_bytes_after = kv_bytes(caches) + report.kv_bytes_staying
    report.kv_dtype = kv_dtype(layers[0].entries_in(caches))


def note_choices(
    choices: list[Choice], layers: list[AttentionLayer], caches: list, report: CompressionReport
) -> None:
    """Note in the report how many entries of each cache are kept, and their share of the attention.

    This waits for all choices, and for everything that the device computes before them.

    Raises: SnapKVError: scores are NaN.
    """
    shares: Any = mx.stack([choice.share for choice in choices]).tolist()
    if any(map(math.isnan, shares)):
        raise nan_scores()
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
    """Return what a policy keeps of a layer, and leave the layer's cache unchanged.

    Args:
        layer: the layer.
        caches: the caches that the prompt was read on.
        plan: the request's plan, with the policy that chooses.
        queries: see `compress_prompt_cache`.
    """
    entries, _ = competing(layer, caches, plan, queries)
    return choose(entries, plan.decode_policy, plan.decode_quota)


def competing(
    layer: AttentionLayer,
    caches: list,
    plan: Plan,
    queries: list[mx.array | None] | None = None,
) -> tuple[Entries, Entries]:
    """Return the prompt's entries, from which the policy chooses, and the entries of later tokens."""
    cache = layer.entries_in(caches)
    entries = cache.held(plan.n_voters if plan.decode_policy.obs_window else 0)
    entries.layer = layer
    given = None if queries is None else queries[layer.index]
    if given is not None:
        obs_window = plan.decode_policy.obs_window
        entries.observed = _voting(layer, given, entries, cache.offset, obs_window)
    n = len(entries) - (cache.offset - plan.n_prompt)
    return entries.between(0, n), entries.between(n, len(entries))


def _voting(
    layer: AttentionLayer, given: mx.array, entries: Entries, stop: int, obs_window: int
) -> Queries:
    """Return the last `obs_window` of the queries given, which end at position `stop`, as voters."""
    B, H, T, D = entries.keys.shape
    q = given.shape
    n_heads = H * len(layer.readers)
    if len(q) != 4 or q[0] != B or q[1] % n_heads or q[3] != D or not 1 <= q[2] <= T:
        raise SnapKVError(
            f"queries must be (B={B}, a multiple of {n_heads} heads, 1 to {T} tokens, head_dim={D}), got {q}"
        )
    n = min(q[2], obs_window or q[2])
    return Queries(
        layer.grouped(given[:, :, -n:], H),
        range(len(entries) - n, len(entries)),
        layer.family.scale_of(layer.attention, D),
        layer.family.sinks_of(layer.attention),
        start=stop - n,
        cap=layer.cap,
    )


def put_chosen(
    layer: AttentionLayer,
    caches: list,
    plan: Plan,
    choice: Choice,
    on_kept: KeptCallback | None = None,
) -> None:
    """Replace the cache of a layer by one of the entries chosen.

    The layer's full entries are freed when the device has copied the chosen ones, unless the caller holds them.
    """
    layer.put(caches, _small_cache(layer, caches, plan, choice, on_kept))


def _small_cache(
    layer: AttentionLayer,
    full: list,
    plan: Plan,
    choice: Choice,
    on_kept: KeptCallback | None,
) -> EvictingCache:
    """Return the cache that the answer is decoded from: the entries chosen, then the entries of later tokens."""
    before = layer.cache_in(full)
    policy = plan.decode_policy
    entries, later = competing(layer, full, plan)
    kept, later = (
        x.packed(plan.options.quantization or x.quantization)
        for x in (entries.taken(choice.kept), later)
    )
    mx.async_eval(kept.stored_keys, kept.positions, kept.received, later.stored_keys)
    mx.async_eval(
        kept.stored_values, later.stored_values
    )  # after the keys, for less memory at once
    entries.release()
    if on_kept is not None:
        on_kept(layer, kept.positions, choice.votes)
    small = decode_cache(layer, kept, plan.n_prompt, policy, plan.decode_quota)
    del entries, kept
    voters = before if policy.observes_answer else None
    small.inherit(voters)
    for i in range(0 if plan.options.is_text else len(later)):
        small.append(*rows((later.stored_keys, later.stored_values), i, i + 1))
        small.inherit(voters)
    mx.async_eval(small.state)
    return small


@dataclass
class Choice:
    """The entries to keep of a layer.

    Attributes:
        kept: indices `(B, n_kv_heads, n)` of the entries.
        votes: the votes for them, in the same shape; None if nothing voted.
        share: float32, the part of all votes that they received, 0 to 1; 1 if nothing voted, and NaN if scores are.
    """

    kept: mx.array
    votes: mx.array | None
    share: mx.array


def choose(entries: Entries, policy: Policy, quota: Quota) -> Choice:
    """Return the `quota` of a layer's entries that a policy keeps, and release `entries`.

    The arrays of the choice are being computed, and nothing waits for them.
    """
    entries.budget = quota.entries
    entries.n_window = quota.n_window
    # Scores come before votes, since a policy may make several kinds of votes in one pass.
    scores = policy.score(entries)
    votes = entries.votes if policy.obs_window else None
    if policy.accumulates_attention:
        votes = entries.received
    entries.release()
    kept = select(scores, quota)
    share = mx.array(1.0)
    voted = None
    if votes is not None:
        voted = mx.take_along_axis(votes, kept, axis=-1)
        share = voted.sum() / votes.sum()
    share = mx.where(mx.any(mx.isnan(scores)), math.nan, share)
    mx.async_eval(kept, voted, share)
    return Choice(kept, voted, share)
