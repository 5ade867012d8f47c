"""AdaKV and FastGen, whose heads keep different numbers of entries: their answers, measured by mask.

To store what they keep, every head would be padded to the longest one. So all entries are held, and at decoding a mask
for each KV head hides what the method drops: that measures accuracy, and neither speed nor memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar
from unicodedata import category

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..caches.layers import attention_layers, kv_bytes, quotas_of
from ..caches.recording import RecordingKVCache
from ..engine.choosing import score
from ..engine.report import CompressionReport
from ..entries.attention import attention_weights
from ..entries.entries import Entries
from ..entries.selection import nan_scores, top_positions
from ..errors import SnapKVError, UnknownOptionError, UnsupportedModelError
from ..policies import Policy, resolve_policy
from ..policies.budgets import Quota
from .reading import Reading, shares_reading

# Which of a prompt's tokens are special, and which nothing but punctuation, bool `(T,)` each.
Kinds = tuple[mx.array, mx.array]

OF = " of "
QUERIES = 128  # whose attention is computed at a time


class HeadWise(ABC):
    """A method with head-wise budgets; its fields are numbers from 0 to 1, but for `policy`, whose queries vote."""

    name: ClassVar[str]
    policy: Policy

    @abstractmethod
    def visible(self, entries: Entries, quota: Quota, kinds: Kinds) -> mx.array:
        """What each head of a layer keeps, bool `(B, n_kv_heads, T)`; `quota` is what equal budgets would leave it."""

    @classmethod
    def options(cls) -> dict[str, Any]:
        """The numbers, with their defaults."""
        return {f.name: f.default for f in fields(cls) if f.name != "policy"}  # type: ignore[arg-type]

    def __post_init__(self):
        for name in self.options():
            if not 0 <= (value := getattr(self, name)) <= 1:
                raise SnapKVError(f"{self.name} option {name} must be 0 to 1, got {value}")

    def __str__(self) -> str:
        given = {name: getattr(self, name) for name in self.options()}
        changed = [f"{name}={x:g}" for name, x in given.items() if x != self.options()[name]]
        return ":".join(filter(None, (self.name, ",".join(changed))))


@dataclass(frozen=True)
class AdaKV(HeadWise):
    """The layer's budget goes to the best entries of all its heads (Feng et al. 2024, arXiv:2407.11550, section 3).

    Attributes:
        policy: scores the entries, once the prompt is read; its first and most recent ones are always kept.
        safeguard: share of its equal budget that each head gets in any case, rounded down (algorithm 1's alpha); what
            is always kept counts. With 1 all heads get the same.
    """

    name: ClassVar[str] = "adakv"

    policy: Policy
    safeguard: float = 0.2

    def __post_init__(self):
        super().__post_init__()
        policy = self.policy
        if not shares_reading(policy) or policy.counts_by_scores:
            raise SnapKVError(
                f"adakv needs one policy that chooses from full caches, by a number of entries, got {policy}: give "
                "snapkv, or another with schedule=once, and neither mass nor budget=adaptive"
            )

    def __str__(self) -> str:
        return f"{super().__str__()}{OF}{self.policy}"

    def visible(self, entries: Entries, quota: Quota, kinds: Kinds) -> mx.array:
        """As kvpress does it: what is always kept leads, then each head's `int(safeguard * n)` best, then the rest."""
        scores = score(entries, self.policy, quota).scores.astype(mx.float32)
        if mx.any(mx.isnan(scores)).item():
            raise nan_scores()
        return best_of_all_heads(scores, quota, self.safeguard)


def best_of_all_heads(scores: mx.array, quota: Quota, safeguard: float) -> mx.array:
    """As many of `(B, n_kv_heads, T)` scores as equal budgets would keep, the best of all heads, bool of that shape."""
    B, H, T = scores.shape
    n = min(quota.entries, T)
    places = mx.arange(T)
    always = (places < quota.n_sink) | (places >= T - quota.n_window)
    scores = mx.where(always, mx.inf, scores)
    scores = mx.where(_best(scores, int(safeguard * n)), mx.inf, scores)
    return _best(scores.reshape(B, H * T), H * n).reshape(B, H, T)


def _best(scores: mx.array, n: int) -> mx.array:
    """Which are the `n` best along the last axis, bool of the same shape."""
    marked = mx.zeros(scores.shape, mx.bool_)
    return (
        mx.put_along_axis(marked, top_positions(scores, n), mx.array(True), axis=-1)
        if n
        else marked
    )


@dataclass(frozen=True, kw_only=True)
class _Everyone(Policy, registered=False):
    """All of the prompt's queries vote."""

    name: ClassVar[str] = "fastgen"
    obs_window: ClassVar[int] = 2**30
    schedules: ClassVar[tuple[str, ...]] = ("once",)

    n_window: int | str = 1
    schedule: str = "once"

    def fits(self, n_prompt: int) -> bool:
        return False

    def score(self, entries: Entries) -> mx.array:
        return entries.votes


@dataclass(frozen=True)
class FastGen(HeadWise):
    """Each head gets the least that shows it most of its attention (Ge et al. 2023, arXiv:2310.01801, section 4).

    Special tokens; and punctuation; and the entries that received most attention; and the most recent ones; or all. The
    first of these in which the prompt's queries find at least `recovery` of their attention, in the mean. To a query
    the recent entries are those before it; of a KV head's query heads the mean counts.

    Attributes:
        recovery: the share of the attention that is enough (the paper's T).
        frequent, local: shares of the prompt that are kept as those that received most attention, and as recent ones.

    Differs from the paper in that nothing is evicted while the answer is decoded.
    """

    name: ClassVar[str] = "fastgen"
    policy: ClassVar[Policy] = _Everyone()

    recovery: float = 0.95
    frequent: float = 0.3
    local: float = 0.3

    def visible(self, entries: Entries, quota: Quota, kinds: Kinds) -> mx.array:
        received = entries.votes
        T = received.shape[2]
        n_local = int(self.local * T)
        special = mx.broadcast_to(kinds[0], received.shape)
        found = [special, special | kinds[1]]
        found.append(found[-1] | _best(received, int(self.frequent * T)))
        shares = [(received * columns).sum(axis=-1) for columns in found]
        shares.append(_seen(entries, found[-1], n_local))
        found.append(found[-1] | (mx.arange(T) >= T - n_local))
        visible = mx.ones(received.shape, mx.bool_)
        for columns, share in zip(found[::-1], shares[::-1]):
            enough = share >= self.recovery * received.sum(axis=-1)
            visible = mx.where(enough[..., None], columns, visible)
        return visible


def _seen(entries: Entries, columns: mx.array, n_local: int) -> mx.array:
    """The attention that goes to `columns`, bool `(B, n_kv_heads, T)`, or to each query's own `n_local` most recent.

    Returns:
        `(B, n_kv_heads)` float32, summed over the queries, the mean of a group.
    """
    observed, (B, H, T) = entries.voters, columns.shape
    total = mx.zeros((B, H))
    for first in range(0, len(observed.places), QUERIES):
        places = observed.places[first : first + QUERIES]
        heads = observed.heads[:, :, first : first + QUERIES]
        weights = attention_weights(entries.keys, replace(observed, heads=heads, places=places))
        weights = weights.reshape(B, H, -1, len(places), T).mean(axis=2)
        near = mx.arange(T) > mx.arange(places.start, places.stop)[:, None] - n_local
        total = total + (weights * (columns[:, :, None] | near)).sum(axis=(2, 3))
        mx.eval(total)
    return total


def kinds_of(tokenizer, tokens: Sequence[int]) -> Kinds:
    special = set(tokenizer.all_special_ids)
    text = {token: tokenizer.decode([token]).strip() for token in set(tokens) - special}
    marks = {t for t, x in text.items() if x and all(category(c).startswith("P") for c in x)}
    return mx.array([t in special for t in tokens]), mx.array([t in marks for t in tokens])


def headwise(text: str) -> HeadWise:
    """A method by its command-line string: "adakv of snapkv:budget=6%,min_ctx=0", "fastgen:recovery=0.9".

    Raises:
        SnapKVError: it can't be read.
    """
    how, of, policy = text.partition(OF)
    name, _, options = how.strip().partition(":")
    if name == AdaKV.name and of:
        return AdaKV(resolve_policy(policy=policy.strip()), **_numbers(AdaKV, options))  # type: ignore[arg-type]
    if name == FastGen.name and not of:
        return FastGen(**_numbers(FastGen, options))
    raise UnknownOptionError(
        f'by mask are measured "adakv of POLICY" and "fastgen", got {text!r}: other policies are given with --policy'
    )


def _numbers(method: type[HeadWise], text: str) -> dict[str, float]:
    """The numbers of `"key=value,key=value"`."""
    found = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, value = (x.strip() for x in part.partition("="))
        if name not in method.options():
            known = ", ".join(method.options())
            raise UnknownOptionError(f"unknown {method.name} option {name!r}; known: {known}")
        try:
            found[name] = float(value)
        except ValueError:
            raise SnapKVError(
                f"{method.name} option {name} must be a number, got {value!r}"
            ) from None
    return found


class MaskedKVCache(RecordingKVCache):
    """A recording cache that hides some entries from the attention.

    Attributes:
        visible: bool `(B, n_kv_heads, n)`, of the first `n` entries; later ones are seen.
    """

    observes = True  # so that its layer's class is patched while the answer is decoded
    visible: mx.array

    def hide(self, queries: mx.array, keys: mx.array, mask: Any) -> mx.array:
        """What the attention of queries `(B, n_heads, L, D)` to keys `(B, n_kv_heads, T, D)` is to be masked by.

        Args:
            mask: what it would be: None, "causal" or an array.

        Raises:
            UnsupportedModelError: the keys are not those of its own heads.
        """
        B, H, T = keys.shape[:3]
        n_heads, L = queries.shape[1:3]
        if self.visible.shape[1] != H:
            raise UnsupportedModelError("this model's heads can't be masked: it repeats their keys")
        later = mx.ones((B, H, T - self.visible.shape[2]), mx.bool_)
        seen = mx.concatenate([self.visible, later], axis=-1)
        seen = mx.repeat(seen, n_heads // H, axis=1)[:, :, None]
        if isinstance(mask, str):
            mask = mx.arange(T - L, T)[:, None] >= mx.arange(T)
        if mask is None or mask.dtype == mx.bool_:
            return seen if mask is None else seen & mask
        return mx.where(seen, mask, -mx.inf)


def masked(
    reading: Reading, heads: HeadWise, kinds: Kinds, answering: bool
) -> tuple[list, CompressionReport]:
    """A prompt cache that holds everything and shows what `heads` keeps, as `Reading.answering` or `compressed`.

    Returns:
        It and its report, whose entries are the mean over heads and layers.

    Raises:
        SnapKVError: nothing would be hidden, or the model's heads can't be masked.
    """
    policy, n_prompt = heads.policy, len(reading.tokens)
    if n_prompt < policy.min_ctx or policy.fits(n_prompt):
        raise SnapKVError(
            f"{heads} would hide nothing of {n_prompt} tokens: give it a lower budget and min_ctx=0"
        )
    request = reading.request(policy, answering)
    caches, at = request.caches, request.decision.at
    layers = attention_layers(reading.model, caches)
    shares = []
    for layer, quota in zip(layers, quotas_of(layers, policy.quotas, n_prompt)):
        family, held = layer.family, layer.cache_in(caches)
        if family.attends != "scaled_dot_product_attention" or family.tiled or family.latent:
            raise UnsupportedModelError(
                f"the heads of {family.module!r} models can't be masked one by one: leave --by-mask out"
            )
        cache = MaskedKVCache(0, 0, KVCache.step, layer)
        cache.keys, cache.values, cache.offset = held.keys, held.values, held.offset
        cache.visible = heads.visible(held.held().between(0, at), quota, kinds)
        shares.append(cache.visible.mean().item())
        layer.put(caches, cache)
    report = CompressionReport(str(heads), n_prompt)
    report.entries_kept = [round(at * sum(shares) / len(shares))]
    report.kv_bytes_before = report.kv_bytes_after = kv_bytes(caches)
    return caches, report
