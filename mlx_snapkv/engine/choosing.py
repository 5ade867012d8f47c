"""What a policy keeps of each layer's entries: its scores, and the choice by them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import mlx.core as mx

from ..entries.entries import Entries
from ..entries.selection import nan_scores
from ..errors import SnapKVError
from ..policies import Policy
from ..policies.budgets import Quota, shared_out
from ..several.ranks import Ranks
from ..several.shard import Shard


@dataclass
class Choice:
    """What is to be kept of a layer: places, scores and votes `(B, n_kv_heads, n)`, and the share of the attention."""

    kept: mx.array
    scores: mx.array
    votes: mx.array | None
    quota: Quota
    share: float | None


@dataclass
class Scored:
    """A layer's scores and the attention its entries received, `(B, n_kv_heads, T)` each.

    `heads` are the ranks that share the layer's KV heads.
    """

    scores: mx.array
    votes: mx.array | None
    heads: Ranks


def score(entries: Entries, policy: Policy, quota: Quota) -> Scored:
    """A policy's scores of a layer's entries, of which `quota` are to stay; nothing is computed yet."""
    entries.budget, entries.n_window = quota.entries, quota.n_window
    scores = policy.score(entries)
    votes = entries.received if policy.accumulates_attention else None
    if policy.obs_window and not policy.accumulates_attention:
        votes = entries.votes
    return Scored(scores, votes, entries.heads)


def choose_all(
    scored: Iterable[Scored], policy: Policy, quotas: list[Quota], shard: Shard
) -> list[Choice]:
    """What a policy keeps, layer by layer; all scores are held at once only if it shares its budget out by them.

    A failure on one rank is raised on all.
    """

    def choices() -> list[Choice]:
        layers, wanted = scored, quotas
        if policy.adaptive:
            layers = []
            for layer in scored:
                mx.eval(layer.scores, layer.votes)
                layers.append(layer)
            wanted = shared_out([layer.scores for layer in layers], quotas)
        return [choose(layer, quota) for layer, quota in zip(layers, wanted)]

    shard.ranks.synchronize()
    return shard.ranks.agreed(choices, SnapKVError)


def choose(scored: Scored, quota: Quota) -> Choice:
    """What is kept of a layer's entries; SnapKVError if the scores are NaN."""
    scores, votes = scored.scores, scored.votes
    kept = quota.select(scores)
    share = voted = None
    if votes is not None:
        voted = mx.take_along_axis(votes, kept, axis=-1)
        received, every = scored.heads.sum(mx.stack([voted.sum(), votes.sum()]))
        share = received / every
    of_kept = mx.take_along_axis(scores, kept, axis=-1)
    nan = scored.heads.max(mx.any(mx.isnan(scores)).astype(mx.int32))
    mx.eval(kept, of_kept, voted, share, nan)
    kept_share = None if share is None else float(share.item())  # type: ignore[arg-type]
    if nan.item() or (kept_share is not None and math.isnan(kept_share)):
        raise nan_scores()
    return Choice(kept, of_kept, voted, quota, kept_share)
