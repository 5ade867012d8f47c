"""SnapKV: the queries at the end of the prompt vote for the entries that the answer needs.

Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024 (arXiv:2404.14469).
"""

from dataclasses import dataclass
from functools import reduce

import mlx.core as mx

from ..entries.attention import shared_logits
from ..entries.entries import Entries
from .base import Policy
from .budgets import amount, is_amount, mean_entries
from .critical import two_stages

ON_FULL = ("grow", "slide", "reselect", "keydiff")
CHOOSING = ("reselect", "keydiff")
POOLS = ("forward", "avg", "max")
LATEST = (32, 64)  # queries, which "forward" compares with those before them
DEFAULT_LOOKAHEAD = 32  # answer tokens, where the prompt's last token votes


@dataclass(frozen=True, kw_only=True)
class SnapKV(Policy):
    """Sink + `top_k` voted entries + recent window, by default chosen once, when the prompt has been read.

    Attributes:
        top_k: voted entries kept per KV head.
        n_sink: first entries, always kept.
        n_window: most recent entries, always kept: a number, or a share of the budget ("25%").
        budget: all entries, instead of `top_k`: a number, a share of the prompt ("25%"), or a mean over the
            layers ("pyramid:2048"). By default the fewest of which `top_k` are voted.
        obs_window: prompt queries that vote (the paper's L_obs).
        pool_kernel: width of the pooling over the votes; 1 is none (section 4.1). It should be about as wide as the
            values to be found.
        pool: "avg" and "max" pool over the neighbours on both sides, as the paper does; the width is then odd.
            "forward" takes the highest of an entry's own votes, which plain text needs, and of two contrasts, which
            exact values need: how much more the prompt's last 32 or 64 queries vote than those before them, averaged
            over the entry and the `pool_kernel - 1` before it. A model that looks a value up attends to the words
            before the value and reads on from there; what all queries attend to, such as line breaks, has no contrast.
        heads: "per_head" ranks the entries of every KV head on its own, as in the paper; "shared"
            keeps one set for all heads, by the highest logit over heads and queries.
        critical: choose the second half of the budget by the votes times the size of what the attention's output
            projection makes of an entry's value (CriticalKV: Feng et al. 2025, arXiv:2502.03805).
        last_token: the observation window ends with the prompt's last token, whose query predicts the
            answer's first; False ends it one before.
        lookahead: answer tokens decoded on all entries, whose queries vote too, before the compression. None is 32, or
            none with last_token=False.
        min_ctx: prompts with fewer tokens are left alone.
        prefill_chunk: tokens a prefill chunk at most; None follows `prefill_step_size`.
        on_full: what becomes of the answer's own entries. "grow", as in the paper, keeps all of them beside the
            budget. The others stay within the budget, at a fixed shape, and cost more of the answer (docs/quality.md):
            when the recent window is full, "slide" drops the oldest entry; every `n_window // 2` tokens, "keydiff"
            compares all entries held, the prompt's too, and drops those with the least distinct keys, and "reselect"
            those that the last `obs_window` queries attend to least.
        reserve: how many of the voted entries, those with most votes, on_full="keydiff" never drops: a number or a
            share. The more it is, the less stays of what the answer said.
        schedule, block: see `Policy`; "block" is what the papers compare with.

    Differs from the paper in what is always kept (its observation window; here a sink and a recent window), in
    pool="forward", and in that pooling sees the middle only, so that votes for entries kept anyway don't leak out.
    The paper's own choice: pool="avg", pool_kernel=7, obs_window=32, n_window=32, n_sink=0, lookahead=0.
    """

    name = "snapkv"
    summary = "the prompt's last queries vote, pooled over neighbours"
    paper = "Li et al. 2024, arXiv:2404.14469"

    top_k: int = 4096
    n_sink: int = 4
    n_window: int | str = "25%"
    budget: int | str = None  # type: ignore[assignment]  # a value once the policy is made
    obs_window: int = 256  # type: ignore[misc]
    pool_kernel: int = 16
    min_ctx: int = 0
    prefill_chunk: int | None = None  # type: ignore[misc]
    pool: str = "forward"
    heads: str = "per_head"
    critical: bool = False
    last_token: bool = True  # type: ignore[misc]
    lookahead: int | None = None  # type: ignore[misc]
    on_full: str = "grow"  # type: ignore[misc]
    reserve: int | str = "10%"
    schedule: str = "once"

    def __post_init__(self):
        for name in ("top_k", "n_sink", "min_ctx"):
            self._require_count(name)
        self._require_count("obs_window", least=1)
        allowed = 'a whole number of entries of at least 1 or a share such as "25%"'
        self._require("n_window", is_amount(self.n_window, least=1), allowed)
        if self.lookahead is not None:
            self._require_count("lookahead", most=256)
        self._require("pool", self.pool in POOLS, "forward, avg or max")
        self._require_count("pool_kernel", least=1, most=255)
        odd = self.pool == "forward" or self.pool_kernel % 2 == 1
        self._require("pool_kernel", odd, f"odd with pool={self.pool}")
        if self.prefill_chunk is not None:
            self._require_count("prefill_chunk", least=1)
        self._require("heads", self.heads in ("per_head", "shared"), "per_head or shared")
        self._require("critical", isinstance(self.critical, bool), "true or false")
        if self.critical:
            self._require("heads", self.heads == "per_head", "per_head with critical")
        self._require("last_token", isinstance(self.last_token, bool), "true or false")
        self._require(
            "lookahead", self.last_token or not self.lookahead, "0 when last_token is false"
        )
        self._require("on_full", self.on_full in ON_FULL, ", ".join(ON_FULL))
        self._require("reserve", is_amount(self.reserve), 'a whole number or a share such as "10%"')
        if self.on_full in ("slide", "reselect"):
            self._require("schedule", self.schedule == "once", f"once with on_full={self.on_full}")
        self._settle_budget()
        super().__post_init__()

    def _settle_budget(self) -> None:
        """`budget` and `top_k` say the same, unless `budget` depends on the prompt."""
        if self.budget is None:
            fewest = self._fewest()
            self._require("n_window", fewest is not None, "less than all of the budget")
            object.__setattr__(self, "budget", fewest)
        elif isinstance(self.budget, int):
            object.__setattr__(
                self, "top_k", max(0, self.budget - self.n_sink - self.window(self.budget))
            )

    def _fewest(self) -> int | None:
        """The smallest budget of which `top_k` entries are voted; None if the window is all of it."""
        fixed = self.n_sink + self.top_k
        if not isinstance(self.n_window, str):
            return fixed + self.n_window
        share = amount(self.n_window, 10**9) / 10**9
        if share == 1:
            return None
        budget = int((fixed - 1) / (1 - share))
        while budget - self.window(budget) < fixed:
            budget += 1
        return budget

    @property
    def n_lookahead(self) -> int:
        if self.lookahead is None:
            return DEFAULT_LOOKAHEAD if self.last_token else 0
        return self.lookahead

    def answer_block(self, n_window: int) -> int:
        chooses = self.schedule == "once" and self.on_full in CHOOSING
        return max(1, n_window // 2) if chooses else self.block

    def reserved(self, n_voted: int) -> int:
        return min(n_voted, amount(self.reserve, n_voted)) if self.on_full == "keydiff" else 0

    @property
    def _implied(self) -> str | None:
        if not isinstance(self.budget, int):
            return None
        return "budget" if self.budget == self._fewest() else "top_k"

    def score(self, entries: Entries) -> mx.array:
        """Pooled votes `(B, n_kv_heads, T)` of the middle; plain votes for sink and window.

        With pool="forward" they are mean votes, else sums over the queries.
        """
        if self.heads == "shared":
            votes = entries.heads.max(shared_logits(entries.keys, entries.voters))
            to_pool = [votes]
        elif self.pool == "forward":
            votes, to_pool = mean_and_contrasts(entries)
        else:
            votes = entries.votes
            to_pool = [votes]
        budget = entries.budget or mean_entries(self.budget, len(entries))
        n_window = self.window(budget) if entries.n_window is None else entries.n_window
        end = votes.shape[-1] - n_window
        if end <= self.n_sink:
            return votes
        pooled = [
            pool_votes(each[..., self.n_sink : end], self.pool, self.pool_kernel)
            for each in to_pool
        ]
        own = [votes[..., self.n_sink : end]] if self.pool == "forward" else []
        middle = reduce(mx.maximum, own + pooled)
        if self.critical:
            n_certain = budget // 2 - self.n_sink - n_window
            n_heads, n_voters = entries.queries.shape[1:3]
            mean = middle if self.pool == "forward" else middle / n_voters
            middle = two_stages(mean, entries, self.n_sink, n_certain, n_heads)
        return mx.concatenate([votes[..., : self.n_sink], middle, votes[..., end:]], axis=-1)


def mean_and_contrasts(entries: Entries) -> tuple[mx.array, list[mx.array]]:
    """Mean votes, those of the last 32 queries counting half, and how much more the last ones vote than those before.

    `(B, n_kv_heads, T)` float32 each. There is a contrast for the prompt's last 32 queries and one for its last 64, the
    answer's tokens that look ahead besides; of so few queries that none come before, it is the mean itself.
    """
    places = entries.voters.places
    n, n_ahead = len(places), max(0, places.stop - len(entries))
    counts = [count + n_ahead for count in LATEST if count + n_ahead < n]
    if not counts:
        return entries.votes / n, [entries.votes / n]
    latest, every = entries.latest_votes(*counts), entries.votes
    contrasts = [
        mx.maximum(votes / count - (every - votes) / (n - count), 0)
        for votes, count in zip(latest, counts)
    ]
    return (every / n + latest[0] / counts[0]) / 2, contrasts


def pool_votes(votes: mx.array, pool: str, kernel: int) -> mx.array:
    """Pool `(..., T)` votes over `kernel` entries, stride 1, same length.

    "avg" and "max" are centred, "forward" is the mean of an entry and those before it. Means divide by the full
    kernel and take what lies outside as zeros; "max" ignores it.
    """
    if kernel == 1:
        return votes
    T, half = votes.shape[-1], kernel // 2
    beside = (kernel - 1, 0) if pool == "forward" else (half, half)
    widths = [(0, 0)] * (votes.ndim - 1) + [beside]
    padded = mx.pad(votes, widths, constant_values=-mx.inf if pool == "max" else 0.0)
    shifted = [padded[..., i : i + T] for i in range(kernel)]
    if pool == "max":
        return reduce(mx.maximum, shifted)
    return sum(shifted[1:], shifted[0]) / kernel
