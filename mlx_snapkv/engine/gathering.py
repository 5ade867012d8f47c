"""Small caches that are gathered anew, in the middle of an answer, from all entries that their layers have."""

import dataclasses
from dataclasses import dataclass

import mlx.core as mx

from ..caches.layers import AttentionLayer, quotas_of
from ..caches.recollection import Recollection
from ..entries.selection import nan_scores
from ..policies import Policy, SnapKV
from ..policies.budgets import Quota
from .report import Verified

# What earlier votes count for in the next: else a comma that votes would give up what the words before it had found.
FADING = 0.3


@dataclass
class _Layer:
    """A layer, all its entries, what its small cache holds, who scores them, and the scores of the last votes."""

    layer: AttentionLayer
    everything: Recollection
    quota: Quota
    voter: Policy
    scores: mx.array | None = None

    def scored(self, scores: mx.array) -> mx.array:
        """New scores `(B, n_kv_heads, T)`, the earlier ones fading in them."""
        if self.scores is not None:
            more = scores.shape[-1] - self.scores.shape[-1]
            scores = scores + FADING * mx.pad(self.scores, [(0, 0), (0, 0), (0, more)])
        self.scores = scores
        return scores


class Gathering:
    """The small caches of a model's full-attention layers, and all entries of each layer.

    Args:
        layers: those layers.
        recollections: all entries of each; `gather` adds the tokens that only the small cache holds.
        caches: the small caches, made by `decode_cache` with `gathers`.
        policy: what the prompt was compressed by; if it does not pool votes, SnapKV does.
        verified: where votes are counted.
    """

    def __init__(
        self,
        layers: list[AttentionLayer],
        recollections: list[Recollection],
        caches: list,
        policy: Policy,
        verified: Verified,
    ):
        self._verified = verified
        counts = [layer.entries_in(caches).n_entries for layer in layers]
        quotas = quotas_of(layers, policy.quotas, len(recollections[0]))
        self._layers: list[_Layer] = []
        for layer, everything, n, quota in zip(layers, recollections, counts, quotas):
            # A short prompt's entries are fewer than the budget, which those of a long answer then fill.
            n = n if policy.counts_by_scores else quota.entries
            quota = Quota(n, quota.n_sink, quota.n_window)
            self._layers.append(_Layer(layer, everything, quota, _voter(policy, quota)))
        gathered = max(each.quota.entries for each in self._layers)
        self._most: int = max(*counts, gathered) + policy.answer_block(quotas[0].n_window)

    def is_due(self, caches: list) -> bool:
        """Whether a small cache holds `policy.answer_block` tokens more than what was gathered."""
        return any(each.layer.entries_in(caches).n_entries >= self._most for each in self._layers)

    def gather(self, caches: list) -> None:
        """Let the newest query of every layer vote over all its entries, and hold what that votes for.

        Raises:
            SnapKVError: the votes are NaN, or entries can't be read; every layer then holds what it held or what
                it was to.
        """
        self._verified.votes += 1
        nan = []
        for each in self._layers:
            small, everything = each.layer.cache_in(caches), each.everything
            held = small.held(1)
            newest = held.between(len(held) - max(0, small.offset - len(everything)), len(held))
            everything.append(*newest.plain())
            if len(everything) == 0:
                continue  # the very first token has none to ask
            place = held.voters.start
            asked = dataclasses.replace(held.voters, places=range(place, place + 1))
            scores = each.scored(each.voter.score(everything.voted_by(asked)))
            small.offset = len(everything)
            small.hold(everything.gather(each.quota.select(scores), small.offset))
            nan.append(each.layer.heads.max(mx.any(mx.isnan(scores)).astype(mx.int32)))
            mx.eval(small.state, scores, nan)  # layer by layer, for less memory at once
        if any(flag.item() for flag in nan):
            raise nan_scores()


def _voter(policy: Policy, quota: Quota) -> Policy:
    """Who makes scores of one query's attention: the policy itself, if it pools them, or SnapKV."""
    if isinstance(policy, SnapKV) and policy.critical:  # one token's votes ask where, not how much
        return dataclasses.replace(policy, critical=False)
    if policy.pools_votes:
        return policy
    return SnapKV(n_sink=quota.n_sink, n_window=max(1, quota.n_window), obs_window=1)
