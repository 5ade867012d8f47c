"""AdaKV and FastGen, whose heads keep different numbers of entries: their answers, measured by mask.

To store what they keep, every head would be padded to the longest one. So all entries are held, and at decoding a mask
for each KV head hides what the method drops: that measures accuracy, and neither speed nor memory.
"""

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar
from unicodedata import category

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from mlx_snapkv.caches.layers import attention_layers, kv_bytes
from mlx_snapkv.caches.recording import RecordingKVCache
from mlx_snapkv.engine.compress import score
from mlx_snapkv.engine.report import CompressionReport
from mlx_snapkv.entries.attention import attention_weights
from mlx_snapkv.entries.entries import Entries
from mlx_snapkv.entries.selection import nan_scores, top_positions
from mlx_snapkv.errors import SnapKVError, UnknownOptionError, UnsupportedModelError
from mlx_snapkv.measure.methods import Method, require_compression
from mlx_snapkv.measure.reading import AnyPolicy, Reading, shares_reading
from mlx_snapkv.planning.config import CompressionConfig
from mlx_snapkv.planning.request_plan import reason_to_leave
from mlx_snapkv.policies import Policy, SnapKV, resolve_policy
from mlx_snapkv.policies.budgets import Quota

# Which of a prompt's tokens are special, and which nothing but punctuation, bool `(T,)` each.
Kinds = tuple[mx.array, mx.array]

OF = " of "
BY_MASK = ", by mask"  # ends the names of methods that hide entries instead of dropping them
QUERIES = 128  # whose attention is computed at a time


@dataclass(frozen=True, kw_only=True)
class HeadWise(Policy, registered=False):
    """A method whose heads don't get equal parts of a budget; its options are shares, from 0 to 1."""

    obs_window: ClassVar[int] = 2**30
    schedules: ClassVar[tuple[str, ...]] = ("once",)

    n_window: int | str = 1
    schedule: str = "once"  # type: ignore[misc]

    @classmethod
    def options(cls) -> list[str]:
        return [f.name for f in fields(cls) if f.type is float]

    def __post_init__(self):
        for name in self.options():
            is_share = not isinstance(value := getattr(self, name), str) and 0 <= value <= 1
            self._require(name, is_share, "0 to 1")

    def fits(self, n_prompt: int) -> bool:
        return False

    def score(self, entries: Entries) -> mx.array:
        return entries.votes

    @property
    def scores(self) -> Policy:
        """The policy that scores the entries, and whose queries vote: by default all of the prompt's."""
        return self

    @abstractmethod
    def visible(self, entries: Entries, quota: Quota, kinds: Kinds) -> mx.array:
        """What each head of a layer keeps, bool `(B, n_kv_heads, T)`; `quota` is what equal budgets would leave it."""


@dataclass(frozen=True, kw_only=True)
class AdaKV(HeadWise, registered=False):
    """The layer's budget goes to the best entries of all its heads (Feng et al. 2024, arXiv:2407.11550, section 3).

    `policy` scores the entries. Each head gets `safeguard` of its equal budget in any case, rounded down (algorithm 1's
    alpha), and its first and most recent entries.
    """

    name: ClassVar[str] = "adakv"

    policy: Policy = field(default_factory=SnapKV)
    safeguard: float = 0.2

    def __post_init__(self):
        super().__post_init__()
        if not shares_reading(self.policy):
            raise SnapKVError(
                f"adakv needs one policy that chooses from full caches, got {self.policy}: "
                "give snapkv, or another with schedule=once"
            )

    @property
    def scores(self) -> Policy:
        return self.policy

    def __str__(self) -> str:
        return f"{super().__str__()}{OF}{self.policy}"

    def visible(self, entries: Entries, quota: Quota, kinds: Kinds) -> mx.array:
        scores = score(entries, self.policy, quota).scores.astype(mx.float32)
        if mx.any(mx.isnan(scores)).item():
            raise nan_scores()
        return best_of_all_heads(scores, quota, self.safeguard)


def best_of_all_heads(scores: mx.array, quota: Quota, safeguard: float) -> mx.array:
    """As many of `(B, n_kv_heads, T)` scores as equal budgets would keep, the best of all heads, bool of that shape.

    As in kvpress, what is always kept leads, then each head's own part, then the best of the rest.
    """
    B, H, T = scores.shape
    n = min(quota.entries, T)
    places = mx.arange(T)
    always = (places < quota.n_sink) | (places >= T - quota.n_window)
    scores = mx.where(always, mx.inf, scores)
    scores = mx.where(_best(scores, int(safeguard * n)), mx.inf, scores)
    return _best(scores.reshape(B, H * T), H * n).reshape(B, H, T)


def _best(scores: mx.array, n: int) -> mx.array:
    """Which are the `n` best along the last axis, bool of the same shape."""
    none = mx.zeros(scores.shape, mx.bool_)
    return mx.put_along_axis(none, top_positions(scores, n), mx.array(True), -1) if n else none


@dataclass(frozen=True, kw_only=True)
class FastGen(HeadWise, registered=False):
    """Each head gets the least that shows it most of its attention (Ge et al. 2023, arXiv:2310.01801, section 4).

    Special tokens; and punctuation; and the share `frequent` that received most attention; and the share `local` that
    is most recent, to a query those before it; or all. The first of these in which the prompt's queries find at least
    `recovery` (the paper's T) of their attention, in the mean. Unlike the paper's, it evicts nothing while decoding.
    """

    name: ClassVar[str] = "fastgen"

    recovery: float = 0.95
    frequent: float = 0.3
    local: float = 0.3

    def visible(self, entries: Entries, quota: Quota, kinds: Kinds) -> mx.array:
        received = entries.votes
        T = received.shape[2]
        n_local = int(self.local * T)
        special = mx.broadcast_to(kinds[0], received.shape)
        marked = special | kinds[1]
        frequent = marked | _best(received, int(self.frequent * T))
        recent = frequent | (mx.arange(T) >= T - n_local)
        visible = mx.ones(received.shape, mx.bool_)
        for columns in (recent, frequent, marked, special):
            share = (received * columns).sum(axis=-1)
            if columns is recent:
                share = _seen(entries, frequent, n_local)
            enough = share >= self.recovery * received.sum(axis=-1)
            visible = mx.where(enough[..., None], columns, visible)
        return visible


def _seen(entries: Entries, columns: mx.array, n_local: int) -> mx.array:
    """The attention `(B, n_kv_heads)` to `columns`, bool `(B, n_kv_heads, T)`, or to the `n_local` before a query.

    It is summed over the queries, and the mean of a group's query heads.
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


class ByMask(Method):
    """A head-wise method, whose answers are decoded with a mask over all entries."""

    @property
    def name(self) -> str:
        return f"{super().name}{BY_MASK}"


def scoring(policy: AnyPolicy | None) -> AnyPolicy | None:
    """The policy that scores entries: a head-wise method's, or the policy itself."""
    return policy.scores if isinstance(policy, HeadWise) else policy


def by_mask(texts: Iterable[str], lengths: Sequence[int]) -> list[ByMask]:
    """The methods of such strings; SnapKVError if one would hide nothing of prompts of all these lengths."""
    methods = [ByMask(headwise(text)) for text in dict.fromkeys(texts)]
    require_compression([Method(scoring(method.policy)) for method in methods], lengths)
    return methods


def headwise(text: str) -> HeadWise:
    """The method of such a string: "adakv of snapkv:budget=6%", "fastgen:recovery=0.9"."""
    how, of, policy = text.partition(OF)
    name, _, options = how.strip().partition(":")
    if (name, of) == (FastGen.name, ""):
        return FastGen.from_string(options)  # type: ignore[return-value]
    if (name, of) == (AdaKV.name, OF):
        method: Any = AdaKV.from_string(options)
        return replace(method, policy=resolve_policy(policy=policy.strip()))
    raise UnknownOptionError(
        f'--by-mask must be "adakv of POLICY" or "fastgen", got {text!r}: give other policies with --policy'
    )


class MaskedKVCache(RecordingKVCache):
    """A recording cache that hides entries from the attention, whose class is patched while the answer is decoded."""

    observes = True
    visible: mx.array  # bool `(B, n_kv_heads, n)`, of the first `n` entries; later ones are seen

    def hide(self, queries: mx.array, keys: mx.array, mask: Any) -> mx.array:
        """The mask of queries `(B, n_heads, L, D)` on keys `(B, n_kv_heads, T, D)`, given one of any of MLX's kinds."""
        B, H, T = keys.shape[:3]
        n_heads, L = queries.shape[1:3]
        later = mx.ones((B, H, T - self.visible.shape[2]), mx.bool_)
        seen = mx.concatenate([self.visible, later], axis=-1)
        seen = mx.repeat(seen[:, :, None], n_heads // H, axis=1)
        if isinstance(mask, str):
            mask = mx.arange(T - L, T)[:, None] >= mx.arange(T)
        if mask is None:
            return seen
        return seen & mask if mask.dtype == mx.bool_ else mx.where(seen, mask, -mx.inf)


def masked(
    reading: Reading, heads: HeadWise, tokenizer: Any, answering: bool
) -> tuple[list, CompressionReport]:
    """As `Reading.compressed`: a cache of all entries that shows what `heads` keeps, and its report."""
    policy, n_prompt = heads.scores, len(reading.tokens)
    if (reason := reason_to_leave(CompressionConfig(policy), n_prompt)) is not None:
        raise SnapKVError(f"{heads} would hide none of {n_prompt} tokens: {reason}")
    caches, kinds = reading.request(policy, answering).caches, kinds_of(tokenizer, reading.tokens)
    layers = attention_layers(reading.model, caches)
    shares, quota = [], policy.quota(n_prompt)
    for layer in layers:
        family, held = layer.family, layer.cache_in(caches)
        if family.tiled or not family.asks_to_hide:
            raise UnsupportedModelError(
                f"the heads of {family.module!r} models can't be masked one by one: drop --by-mask"
            )
        cache = MaskedKVCache(0, 0, KVCache.step, layer)
        cache.share(held.growing, held.offset)
        cache.visible = heads.visible(held.held().between(0, n_prompt), quota, kinds)
        shares.append(float(cache.visible.mean()))
        layer.put(caches, cache)
    report = CompressionReport(str(heads), n_prompt)
    report.entries_kept = [round(n_prompt * sum(shares) / len(shares))]
    report.kv_bytes_before = report.kv_bytes_after = kv_bytes(caches)
    return caches, report
