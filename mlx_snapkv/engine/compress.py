"""What a policy keeps of a prompt's entries, and its full caches' replacement by that."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..caches.decode import decode_cache
from ..caches.layers import (
    AttentionLayer,
    attention_layers,
    is_compressed,
    kv_bytes,
    kv_dtype,
    quotas_of,
)
from ..entries.entries import Entries
from ..entries.quantization import Quantization, rows
from ..entries.queries import Queries
from ..entries.selection import nan_scores
from ..errors import SnapKVError
from ..planning.prompt_plan import PromptPlan, fits_reason
from ..policies import Policy, Stages, resolve_policy
from ..policies.budgets import Quota
from ..several.ranks import Ranks
from .report import CompressionReport

# Receives what is kept of a layer: the positions `(B, n_kv_heads, n)`, in order, and their votes, if there were any.
KeptCallback = Callable[[AttentionLayer, mx.array, mx.array | None], None]


def compress_prompt_cache(
    model,
    prompt_cache: list,
    policy: Policy | Stages | str,
    queries: list[mx.array | None] | None = None,
    quantization: Quantization | None = None,
) -> CompressionReport:
    """Replace the full KV caches of `prompt_cache`, which `model` has filled, by compressed ones, in place.

    Args:
        policy: a policy object, or a string such as "keydiff:budget=8192"; of two stages, the second chooses, from all.
        queries: by layer, the post-RoPE queries `(B, n_heads, n, head_dim)` of the cache's last `n` tokens, for
            policies that vote, of which the last `obs_window` do; not needed for caches that recorded them.
        quantization: how the entries kept are quantised, if at all.

    Returns: The report; its `reason` says why if nothing was dropped.

    Raises:
        SnapKVError: the cache is compressed already, queries are missing, or scores are NaN; the cache is as it was.
    """
    chosen = resolve_policy(policy=policy)
    if chosen is None:
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
    report = CompressionReport(str(chosen), n)
    _, decode_policy = chosen.stages
    if all(n <= quota.entries for quota in decode_policy.quotas(n, layers[0].n_layers)):
        report.reason = fits_reason(n, decode_policy)
        return report
    plan = PromptPlan(n, n, n)  # no query is to be recorded any more
    compression = Compression(
        layers, prompt_cache, decode_policy, plan, report, quantization, queries
    )
    return compression.compress()


@dataclass
class Compression:
    """One replacement of a prompt cache's full entries, which fills in the `report`.

    Nothing is changed before every layer has chosen; then the layers are compressed one at a time, and the full
    entries of each are freed at once.
    """

    layers: list[AttentionLayer]
    caches: list
    decode_policy: Any  # a policy; or sparse attention, which scores nothing
    plan: PromptPlan
    report: CompressionReport
    quantization: Quantization | None = None
    queries: list[mx.array | None] | None = None
    on_kept: KeptCallback | None = None
    is_compressed: bool = False

    def compress(self) -> CompressionReport:
        started, report = time.perf_counter(), self.report
        # Also where nobody votes: the tokens that choose instead are computed on all ranks.
        self.layers[0].shard.ranks.synchronize()
        choices = self.choose()
        report.kv_bytes_before = sum(x.entries_in(self.caches).full_nbytes for x in self.layers)
        chosen = {layer.index: choice for layer, choice in zip(self.layers, choices)}
        found = [chosen.get(i) for i in range(len(self.caches))]
        report.entries_kept = [None if x is None else x.kept.shape[-1] for x in found]
        report.attention_share = [None if x is None else x.share for x in found]
        self.keep(choices)
        mx.clear_cache()
        self.is_compressed = True
        self.begin_answer()
        report.kv_bytes_after = kv_bytes(self.caches) + report.kv_bytes_staying
        report.kv_dtype = kv_dtype(self.layers[0].entries_in(self.caches))
        if self.decode_policy.schedule == "block":
            report.block = self.decode_policy.block
        report.selection_seconds += time.perf_counter() - started
        return report

    def begin_answer(self) -> None:
        """The caches are compressed."""

    def choose(self) -> list[Choice]:
        """What is to be kept, layer by layer; nothing is changed. Nothing at all if the tokens to come choose.

        A failure on one rank is raised on all.
        """
        quotas = self.decode_quotas
        scored = map(self._scored, self.layers, quotas)
        chosen = map(choose, scored, quotas)
        return self.layers[0].shard.ranks.agreed(lambda: list(chosen), SnapKVError)

    @property
    def decode_quotas(self) -> list[Quota]:
        return quotas_of(self.layers, self.decode_policy.quotas, self.plan.n_prompt)

    def _scored(self, layer: AttentionLayer, quota: Quota) -> Scored:
        entries, _ = self._competing(layer)
        found = score(entries, self.decode_policy, quota)
        entries.release()
        return found

    def _competing(self, layer: AttentionLayer) -> tuple[Entries, Entries]:
        """The entries to choose from, with their voters, and those of later tokens."""
        cache = layer.entries_in(self.caches)
        entries = cache.held(self.plan.n_voters if self.decode_policy.obs_window else 0)
        entries.layer = layer
        given = None if self.queries is None else self.queries[layer.index]
        if given is not None:
            entries.observed = self._given(layer, given, entries, cache.offset)
        n = len(entries) - (cache.offset - self.plan.n_prompt)
        return entries.between(0, n), entries.between(n, len(entries))

    def _given(
        self, layer: AttentionLayer, given: mx.array, entries: Entries, stop: int
    ) -> Queries:
        B, H, T, D = entries.keys.shape
        q = given.shape
        n_heads = H * len(layer.readers)
        if len(q) != 4 or q[0] != B or q[1] % n_heads or q[3] != D or not 1 <= q[2] <= T:
            raise SnapKVError(
                f"queries must be (B={B}, a multiple of {n_heads} heads, 1 to {T} tokens, head_dim={D}), got {q}"
            )
        n = min(q[2], self.decode_policy.obs_window or q[2])
        return Queries(
            layer.grouped(given[:, :, -n:], H),
            range(len(entries) - n, len(entries)),
            layer.family.scale_of(layer.attention, D),
            layer.family.sinks_of(layer.attention),
            start=stop - n,
            cap=layer.cap,
        )

    def keep(self, choices: list[Choice]) -> None:
        """Put caches of what was chosen into `caches`."""
        self._replace(self.caches, choices)

    def _replace(self, caches: list, choices: list[Choice]) -> None:
        uniform = len({choice.kept.shape[-1] for choice in choices}) == 1
        for layer, choice in zip(self.layers, choices):
            layer.put(caches, self._compressed(layer, choice, uniform))

    def _compressed(self, layer: AttentionLayer, choice: Choice, uniform: bool) -> object:
        before, policy = layer.cache_in(self.caches), self.decode_policy
        entries, later = self._competing(layer)
        kept, later = (
            x.packed(self.quantization or x.quantization)
            for x in (entries.taken(choice.kept), later)
        )
        mx.eval(kept.stored_keys, kept.positions, kept.received, later.stored_keys)
        mx.eval(kept.stored_values, later.stored_values)  # after the keys, for less memory at once
        entries.release()
        if self.on_kept is not None:
            self.on_kept(layer, kept.positions, choice.votes)
        n_prompt, compaction = self.plan.n_prompt, getattr(before, "compaction", None)
        if compaction is not None:
            kept, compaction = compaction.nearer(kept, n_prompt, closed=policy.closes_gaps)
        small = decode_cache(layer, kept, n_prompt, policy, choice.quota, uniform)
        small.compaction = compaction
        del entries, kept
        voters = before if policy.observes_answer else None
        small.inherit(voters)
        for i in range(len(later)):
            small.append(*rows((later.stored_keys, later.stored_values), i, i + 1))
            small.inherit(voters)
        mx.eval(small.state)
        return small


@dataclass
class Choice:
    """What is to be kept of a layer: places and votes `(B, n_kv_heads, n)`, and the share of the attention."""

    kept: mx.array
    votes: mx.array | None
    quota: Quota
    share: float | None


@dataclass
class Scored:
    """A layer's scores and the attention its entries received, `(B, n_kv_heads, T)` each."""

    scores: mx.array
    votes: mx.array | None
    heads: Ranks  # that share the layer's KV heads


def score(entries: Entries, policy: Policy, quota: Quota) -> Scored:
    """A policy's scores of a layer's entries, of which `quota` are to stay; nothing is computed yet."""
    entries.budget, entries.n_window = quota.entries, quota.n_window
    scores = policy.score(entries)  # first, since it may make several kinds of votes in one pass
    votes = entries.votes if policy.obs_window else None
    if policy.accumulates_attention:
        votes = entries.received
    return Scored(scores, votes, entries.layer.heads)


def choose(scored: Scored, quota: Quota) -> Choice:
    """What is kept of a layer's entries; SnapKVError if the scores are NaN."""
    scores, votes = scored.scores, scored.votes
    kept = quota.select(scores)
    share = voted = None
    if votes is not None:
        voted = mx.take_along_axis(votes, kept, axis=-1)
        received, every = scored.heads.sum(mx.stack([voted.sum(), votes.sum()]))
        share = received / every
    nan = scored.heads.max(mx.any(mx.isnan(scores)).astype(mx.int32))
    mx.eval(kept, voted, share, nan)
    kept_share = None if share is None else float(share.item())  # type: ignore[arg-type]
    if nan.item() or (kept_share is not None and math.isnan(kept_share)):
        raise nan_scores()
    return Choice(kept, voted, quota, kept_share)
