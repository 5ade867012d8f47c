"""Methods whose heads keep different numbers of entries: what each head would keep of a prompt.

They are measured by mask (`by_mask.py`) and nowhere else: to store what they keep, every head would be padded to the
longest one.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from ..engine.choosing import score
from ..entries.attention import attention_weights
from ..entries.entries import Entries
from ..entries.selection import nan_scores, top_positions
from ..errors import SnapKVError, UnknownOptionError
from ..policies import Policy, Stages, resolve_policy
from ..policies.budgets import Quota

OF = " of "
QUERIES = 128  # whose attention is computed at a time


@dataclass(frozen=True)
class Kinds:
    """Which of a prompt's tokens are of a kind, bool `(T,)` each."""

    special: mx.array
    punctuation: mx.array


class HeadWise(ABC):
    """A method with head-wise budgets.

    Attributes:
        policy: whose queries vote, before the prompt is compressed.
    """

    name: ClassVar[str]
    policy: Policy

    @abstractmethod
    def visible(self, entries: Entries, quota: Quota, kinds: Kinds) -> mx.array:
        """What each head of a layer keeps, bool `(B, n_kv_heads, T)`.

        Args:
            quota: what equal budgets would leave each head.
        """


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
        _require_share(self, "safeguard")
        policy = self.policy
        if isinstance(policy, Stages) or policy.schedule != "once" or policy.counts_by_scores:
            raise SnapKVError(
                f"adakv needs one policy that chooses once, by a number of entries, got {policy}: give it "
                "schedule=once, and neither mass nor budget=adaptive"
            )
        if policy.accumulates_attention:
            raise SnapKVError(
                f"adakv can't take {policy}, which counts the attention of all queries: give snapkv, keydiff or another"
            )

    def __str__(self) -> str:
        options = "" if self.safeguard == 0.2 else f":safeguard={self.safeguard:g}"
        return f"{self.name}{options}{OF}{self.policy}"

    def visible(self, entries: Entries, quota: Quota, kinds: Kinds) -> mx.array:
        scores = score(entries, self.policy, quota).scores
        if mx.any(mx.isnan(scores)).item():
            raise nan_scores()
        return best_of_all_heads(scores, quota, self.safeguard)


def best_of_all_heads(scores: mx.array, quota: Quota, safeguard: float) -> mx.array:
    """As many of `(B, n_kv_heads, T)` scores as equal budgets would keep, the best of all heads, bool of that shape.

    As kvpress does it: what is always kept leads, then the `int(safeguard * entries)` best of each head, then the rest.
    """
    B, H, T = scores.shape
    n = min(quota.entries, T)
    places = mx.arange(T)
    always = (places < quota.n_sink) | (places >= T - quota.n_window)
    scores = mx.where(always, mx.inf, scores.astype(mx.float32))
    n_safe = int(safeguard * n)
    if n_safe:
        safe = _marked(top_positions(scores, n_safe), scores.shape)
        scores = mx.where(safe, mx.inf, scores)
    best = top_positions(scores.reshape(B, H * T), H * n)
    return _marked(best, (B, H * T)).reshape(B, H, T)


def _marked(positions: mx.array, shape: tuple[int, ...]) -> mx.array:
    return mx.put_along_axis(mx.zeros(shape, mx.bool_), positions, mx.array(True), axis=-1)


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

    Differs from the paper in that nothing gives way while the answer is decoded.
    """

    name: ClassVar[str] = "fastgen"

    recovery: float = 0.95
    frequent: float = 0.3
    local: float = 0.3

    def __post_init__(self):
        for name in ("recovery", "frequent", "local"):
            _require_share(self, name)

    @property
    def policy(self) -> Policy:  # type: ignore[override]
        return _Everyone()

    def __str__(self) -> str:
        fields = dataclasses.fields(self)
        given = [
            (f.name, getattr(self, f.name)) for f in fields if getattr(self, f.name) != f.default
        ]
        options = ",".join(f"{name}={value:g}" for name, value in given)
        return f"{self.name}:{options}" if options else self.name

    def visible(self, entries: Entries, quota: Quota, kinds: Kinds) -> mx.array:
        received = entries.votes
        T = received.shape[2]
        n_frequent, n_local = int(self.frequent * T), int(self.local * T)
        frequent = mx.zeros(received.shape, mx.bool_)
        if n_frequent:
            frequent = _marked(top_positions(received, n_frequent), received.shape)
        special = mx.broadcast_to(kinds.special, received.shape)
        found = [special, special | kinds.punctuation]
        found.append(found[-1] | frequent)
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
        weights = attention_weights(
            entries.keys, dataclasses.replace(observed, heads=heads, places=places)
        )
        weights = weights.reshape(B, H, -1, len(places), T).mean(axis=2)
        own = mx.arange(places.start, places.stop)[:, None]
        near = mx.arange(T) > own - n_local
        total = total + (weights * (columns[:, :, None] | near)).sum(axis=(2, 3))
        mx.eval(total)
    return total


def _require_share(method: HeadWise, name: str) -> None:
    value = getattr(method, name)
    if not 0 <= value <= 1:
        raise SnapKVError(f"{method.name} option {name} must be 0 to 1, got {value}")


def headwise(text: str) -> HeadWise:
    """A method by its command-line string: "adakv of snapkv:budget=6%,min_ctx=0", "fastgen:recovery=0.9".

    Raises:
        SnapKVError: it can't be read.
    """
    how, of, policy = text.partition(OF)
    name, _, options = how.strip().partition(":")
    if name == AdaKV.name:
        chosen = resolve_policy(policy=policy.strip()) if of else None
        if chosen is None:
            raise SnapKVError(
                f'adakv shares out the budget of a policy: write "adakv of POLICY", got {text!r}'
            )
        return AdaKV(chosen, **_options(AdaKV, options))  # type: ignore[arg-type]  # it looks itself
    if name == FastGen.name and not of:
        return FastGen(**_options(FastGen, options))
    raise UnknownOptionError(
        f'by mask are measured "adakv of POLICY" and "fastgen", got {text!r}: other policies are given with --policy'
    )


def _options(method: type[HeadWise], text: str) -> dict[str, float]:
    """The numbers of `"key=value,key=value"`."""
    known = [f.name for f in dataclasses.fields(method) if f.name != "policy"]  # type: ignore[arg-type]
    found = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, _, value = (x.strip() for x in part.partition("="))
        if name not in known:
            raise UnknownOptionError(
                f"unknown {method.name} option {name!r}; known: {', '.join(known)}"
            )
        try:
            found[name] = float(value)
        except ValueError:
            raise SnapKVError(
                f"{method.name} option {name} must be a number, got {value!r}"
            ) from None
    return found
