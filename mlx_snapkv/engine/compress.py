"""Replacing the full caches of a prompt by what a policy keeps of them."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

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
from ..errors import SnapKVError
from ..policies import Policy, Stages, resolve_policy
from ..policies.budgets import Quota
from .choosing import Choice, Scored, among, choose, choose_all, score
from .prompt_plan import PromptPlan, fits_reason
from .report import CompressionReport

# Receives what is kept of a layer: the positions `(B, n_kv_heads, n)`, in order, and their votes, if there were any.
KeptCallback = Callable[[AttentionLayer, mx.array, mx.array | None], None]


class Compressor(Protocol):
    """Chooses from `caches`, which hold all entries of `layers`, then lets them hold what was chosen."""

    layers: list[AttentionLayer]
    caches: list

    def choose(self) -> list[Choice]:
        """What is to be kept, layer by layer; nothing is changed. Nothing at all if the tokens to come choose."""
        ...

    def keep(self, choices: list[Choice]) -> None:
        """Put caches of what was chosen into `caches`."""
        ...


def compress(
    compressor: Compressor, report: CompressionReport, begin: Callable[[], None] = lambda: None
) -> None:
    """Compress, let what decodes from it begin, and report it."""
    started = time.perf_counter()
    choices = compressor.choose()
    report.entries_kept = [None] * len(compressor.caches)
    report.attention_share = [None] * len(compressor.caches)
    for layer in compressor.layers:
        report.kv_bytes_before += layer.entries_in(compressor.caches).full_nbytes
    for layer, choice in zip(compressor.layers, choices):
        report.entries_kept[layer.index] = choice.kept.shape[-1]
        report.attention_share[layer.index] = choice.share
    compressor.keep(choices)
    mx.clear_cache()
    begin()
    report.kv_bytes_after = kv_bytes(compressor.caches)
    report.kv_dtype = kv_dtype(compressor.layers[0].entries_in(compressor.caches))
    report.selection_seconds += time.perf_counter() - started


def compress_prompt_cache(
    model,
    prompt_cache: list,
    policy: Policy | Stages | str,
    queries: list[mx.array | None] | None = None,
    quantization: Quantization | None = None,
) -> CompressionReport:
    """Replace the full KV caches of `prompt_cache` by compressed ones, in place.

    Args:
        model: the mlx-lm model that filled the cache.
        prompt_cache: one cache a layer; entries of linear and sliding-window layers stay as they are.
        policy: a policy object, or a string such as "keydiff:budget=8192"; of two stages, the second chooses from
            what the first keeps.
        queries: by layer, the post-RoPE queries `(B, n_heads, n, head_dim)` of the cache's last `n` tokens, for
            policies that vote, of which the last `obs_window` do; not needed for caches that recorded them.
        quantization: how the entries kept are quantised, if at all.

    Returns:
        The report; its `reason` says why if nothing was dropped.

    Raises:
        SnapKVError: the cache is compressed already, a layer's queries are missing, or its scores are NaN; the cache
            is then as it was.
    """
    chosen = resolve_policy(policy=policy)
    if chosen is None:
        raise SnapKVError("compress_prompt_cache needs a policy, such as SnapKV(top_k=4096)")
    layers = attention_layers(model, prompt_cache)
    if is_compressed([layer.cache_in(prompt_cache) for layer in layers]):
        raise SnapKVError(
            "this prompt cache is compressed already: give one that holds all entries"
        )
    if queries is not None and len(queries) != len(prompt_cache):
        raise SnapKVError(
            f"queries must have one entry for each of {len(prompt_cache)} layers, got {len(queries)}"
        )
    lengths = {layer.entries_in(prompt_cache).offset for layer in layers}
    if len(lengths) != 1:
        raise SnapKVError(f"all layers must hold the same tokens, got {sorted(lengths)} entries")
    n = lengths.pop()
    report = CompressionReport(str(chosen), n)
    stages = dict.fromkeys(chosen.stages)
    quotas = [quota for stage in stages for quota in stage.quotas(n, layers[0].n_layers)]
    if all(n <= q.entries for q in quotas):
        report.reason = fits_reason(n, chosen)
        return report
    plan = PromptPlan(n, n, n)
    compress(Compression(layers, prompt_cache, chosen, plan, quantization, queries), report)
    return report


@dataclass
class Compression:
    """One replacement of a prompt cache's full entries.

    Nothing is changed before every layer has chosen; then the layers are compressed one at a time, and the full
    entries of each are given up at once.

    Attributes:
        layers: whose caches are to be replaced, in `caches`.
        policy, quantization, queries: as of `compress_prompt_cache`.
        plan: the entries of the prompt compete, and as many queries vote as it says, if the caches recorded them.
        on_kept: called for every layer.
    """

    layers: list[AttentionLayer]
    caches: list
    policy: Policy | Stages
    plan: PromptPlan
    quantization: Quantization | None = None
    queries: list[mx.array | None] | None = None
    on_kept: KeptCallback | None = None

    def __post_init__(self):
        self._stages = list(dict.fromkeys(self.policy.stages))
        self._last = self._stages[-1]

    def choose(self) -> list[Choice]:
        wanted = [stage.quotas for stage in self._stages]
        if len(wanted) > 1:
            wanted[0] = self.policy.prefill_quotas
        by_stage = [quotas_of(self.layers, quotas, self.plan.n_prompt) for quotas in wanted]
        scored = (self._scored(layer, quotas) for layer, *quotas in zip(self.layers, *by_stage))
        return choose_all(scored, self._last, by_stage[-1], self.layers[0].shard)

    def _scored(self, layer: AttentionLayer, quotas: list[Quota]) -> Scored:
        """A layer's scores by the last policy, among what the earlier ones keep; each has its quota."""
        entries, _ = self._competing(layer)
        places = None
        for stage, quota in zip(self._stages[:-1], quotas):
            places = choose(score(entries, stage, quota), quota).kept
            entries = among(entries, places, quota.n_window)
        found = score(entries, self._last, quotas[-1])
        found.places = places
        entries.release()
        return found

    def _competing(self, layer: AttentionLayer) -> tuple[Entries, Entries]:
        """The entries to choose from, with their voters, and those of later tokens."""
        cache = layer.entries_in(self.caches)
        entries = cache.held(self.plan.n_voters if self._last.obs_window else 0)
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
        n = min(q[2], self._last.obs_window or q[2])
        return Queries(
            layer.grouped(given[:, :, -n:], H),
            range(len(entries) - n, len(entries)),
            layer.family.scale_of(layer.attention, D),
            layer.family.sinks_of(layer.attention),
            start=stop - n,
            cap=layer.cap,
        )

    def keep(self, choices: list[Choice]) -> None:
        uniform = len({choice.kept.shape[-1] for choice in choices}) == 1
        for layer, choice in zip(self.layers, choices):
            self._replace(layer, choice, uniform)

    def _replace(self, layer: AttentionLayer, choice: Choice, uniform: bool) -> None:
        before, policy, at = layer.cache_in(self.caches), self._last, self.plan.n_prompt
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
        compaction = getattr(before, "compaction", None)
        if compaction is not None:
            kept, compaction = compaction.nearer(kept, at, closed=policy.closes_gaps)
        small = decode_cache(layer, kept, choice.scores, at, policy, choice.quota, uniform)
        small.compaction = compaction
        del entries, kept
        voters = before if policy.observes_answer else None
        small.inherit(voters)
        for i in range(len(later)):
            small.append(*rows((later.stored_keys, later.stored_values), i, i + 1))
            small.inherit(voters)
        mx.eval(small.state)
        layer.put(self.caches, small)
