"""SnapKV: the queries at the end of the prompt vote for the entries that the answer needs.

Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation", 2024 (arXiv:2404.14469).
"""

from dataclasses import dataclass

import mlx.core as mx

from ..entries.attention import shared_logits
from ..entries.entries import Entries
from .base import Policy
from .budgets import Quota, amount, is_amount, mean_entries
from .critical import two_stages

ON_FULL = ("slide", "grow", "reselect", "keydiff")
CHOOSING = ("reselect", "keydiff")
DEFAULT_LOOKAHEAD = 4  # answer tokens, where the prompt's last token votes


@dataclass(frozen=True, kw_only=True)
class SnapKV(Policy):
    """Sink + `top_k` voted entries + recent window, by default chosen once, when the prompt has been read.

    Attributes:
        top_k: voted entries kept per KV head.
        n_sink: first entries, always kept.
        n_window: most recent entries, always kept. The older half gives way to the answer's first tokens: let it
            be half as long again as a question.
        budget: all entries, instead of `top_k`: a number, a share of the prompt ("25%"), or a mean over the
            layers ("pyramid:2048"). By default `n_sink + top_k + n_window`.
        mass: keep, in each layer, the fewest entries that receive this share (0 to 1) of the votes, instead of
            `top_k`; needs schedule="once".
        max_budget: entries a layer keeps at most for that; by default `budget`.
        obs_window: prompt queries that vote (the paper's L_obs).
        pool_kernel: odd width of the pooling over the votes; 1 is none (section 4.1). Entries near a voted
            one are kept with it, so it should be about as wide as the values to be found.
        pool: "avg" or "max".
        heads: "per_head" ranks the entries of every KV head on its own, as in the paper; "shared"
            keeps one set for all heads, by the highest logit over heads and queries.
        critical: choose the second half of the budget by the votes times the size of what the attention's output
            projection makes of an entry's value (CriticalKV: Feng et al. 2025, arXiv:2502.03805).
        last_token: the observation window ends with the prompt's last token, whose query predicts the
            answer's first; False ends it one before.
        lookahead: answer tokens decoded on all entries, whose queries vote too, before the compression. None is 4, or
            none with last_token=False.
        min_ctx: prompts with fewer tokens are left alone.
        prefill_chunk: tokens a prefill chunk at most; None follows `prefill_step_size`.
        on_full: what becomes of the answer's own entries when they fill the recent window. Within the budget, "slide"
            drops the oldest one; every `n_window // 2` tokens, "keydiff" compares all entries held, the prompt's too,
            and drops next those with the least distinct keys, and "reselect" those that the last `obs_window`
            queries attend to least. "grow" keeps all of them, as in the paper (docs/long-answers.md).
        reserve: how many of the voted entries, those with most votes, on_full="keydiff" never drops: a number or a
            share. The more it is, the less stays of what the answer said (docs/long-answers.md).
        schedule, block: see `Policy`; "block" is what the papers compare with.

    Differs from the paper in what is always kept (its observation window; here a sink and a longer recent
    window), and pooling sees the middle only, so that votes for entries kept anyway don't leak out of them.
    """

    name = "snapkv"
    summary = "the prompt's last queries vote, pooled over neighbours"
    paper = "Li et al. 2024, arXiv:2404.14469"
    pools_votes = True

    top_k: int = 4096
    n_sink: int = 128
    n_window: int = 512  # type: ignore[assignment]  # never a share: the observation window is in it
    budget: int | str = None  # type: ignore[assignment]  # a value once the policy is made
    mass: float | None = None  # type: ignore[misc]
    max_budget: int | str | None = None
    obs_window: int = 32  # type: ignore[misc]
    pool_kernel: int = 21
    min_ctx: int = 49152
    prefill_chunk: int | None = None  # type: ignore[misc]
    pool: str = "avg"
    heads: str = "per_head"
    critical: bool = False
    last_token: bool = True  # type: ignore[misc]
    lookahead: int | None = None  # type: ignore[misc]
    on_full: str = "keydiff"  # type: ignore[misc]
    reserve: int | str = "10%"
    schedule: str = "once"

    def __post_init__(self):
        for name in ("top_k", "n_sink", "min_ctx"):
            self._require_count(name)
        self._require_count("obs_window", least=1)
        self._require_count("n_window", least=1)
        self._require(
            "n_window", self.n_window >= self.obs_window, f"at least obs_window={self.obs_window}"
        )
        if self.lookahead is not None:
            self._require_count("lookahead", most=256)
        self._require_count("pool_kernel", least=1, most=255)
        self._require("pool_kernel", self.pool_kernel % 2 == 1, "odd")
        if self.prefill_chunk is not None:
            self._require_count("prefill_chunk", least=1)
        self._require("pool", self.pool in ("avg", "max"), "avg or max")
        self._require("heads", self.heads in ("per_head", "shared"), "per_head or shared")
        self._require("critical", isinstance(self.critical, bool), "true or false")
        if self.critical:
            self._require("heads", self.heads == "per_head", "per_head with critical")
            self._require("mass", self.mass is None, "left out with critical")
        self._require("last_token", isinstance(self.last_token, bool), "true or false")
        self._require(
            "lookahead", self.last_token or not self.lookahead, "0 when last_token is false"
        )
        self._require("on_full", self.on_full in ON_FULL, ", ".join(ON_FULL))
        self._require("reserve", is_amount(self.reserve), 'a whole number or a share such as "10%"')
        if self.on_full != "keydiff":
            self._require("schedule", self.schedule == "once", f"once with on_full={self.on_full}")
        if self.on_full == "reselect":
            least = 2 * self.obs_window
            self._require("n_window", self.n_window >= least, f"at least {least} for reselect")
        self._settle_budget()
        self._require_mass()
        super().__post_init__()

    def _settle_budget(self) -> None:
        """`budget` and `top_k` say the same, unless `budget` depends on the prompt."""
        always = self.n_sink + self.n_window
        if self.budget is None:
            object.__setattr__(self, "budget", always + self.top_k)
        elif isinstance(self.budget, int) and self.budget >= always:
            object.__setattr__(self, "top_k", self.budget - always)

    def _require_mass(self) -> None:
        if self.mass is None:
            self._require("max_budget", self.max_budget is None, "left out without mass")
            return
        ok = isinstance(self.mass, (int, float)) and not isinstance(self.mass, bool)
        self._require("mass", ok and 0 < self.mass <= 1, "a share above 0 and at most 1")
        self._require("schedule", self.schedule == "once", "once with mass")
        if self.max_budget is not None:
            allowed = 'a whole number of entries or a share such as "25%"'
            self._require("max_budget", is_amount(self.max_budget, least=1), allowed)

    def quotas(self, n_prompt: int, n_layers: int) -> list[Quota]:
        quotas = super().quotas(n_prompt, n_layers)
        if self.mass is not None and self.max_budget is not None:
            most = amount(self.max_budget, n_prompt)
            self._require_room(most)
            quotas = [Quota(most, self.n_sink, self.n_window)] * n_layers
        return quotas

    @property
    def n_lookahead(self) -> int:
        if self.lookahead is None:
            return DEFAULT_LOOKAHEAD if self.last_token else 0
        return self.lookahead

    @property
    def answer_block(self) -> int:
        chooses = self.schedule == "once" and self.on_full in CHOOSING
        return max(1, self.n_window // 2) if chooses else self.block

    def reserved(self, n_voted: int) -> int:
        return min(n_voted, amount(self.reserve, n_voted)) if self.on_full == "keydiff" else 0

    def fits(self, n_prompt: int) -> bool:
        if self.mass is None:
            return super().fits(n_prompt)
        return n_prompt <= self.n_sink + self.n_window

    def __str__(self) -> str:
        text = super().__str__()
        if isinstance(self.budget, int):  # top_k says it
            text = text.replace(f"budget={self.budget},", "")
            text = text.replace(f",budget={self.budget}", "").replace(f":budget={self.budget}", "")
        return text

    def score(self, entries: Entries) -> mx.array:
        """Pooled votes `(B, n_kv_heads, T)` of the middle; plain votes for sink and window."""
        if self.heads == "shared":
            votes = entries.heads.max(shared_logits(entries.keys, entries.voters))
        else:
            votes = entries.votes
        end = votes.shape[-1] - self.n_window
        if end <= self.n_sink:
            return votes
        middle = pool_votes(votes[..., self.n_sink : end], self.pool, self.pool_kernel)
        if self.critical:
            middle = self._critical(middle, entries)
        return mx.concatenate([votes[..., : self.n_sink], middle, votes[..., end:]], axis=-1)

    def _critical(self, votes: mx.array, entries: Entries) -> mx.array:
        """CriticalKV's scores of the middle's pooled votes; sink and window count for the first half of the budget."""
        budget = entries.budget or mean_entries(self.budget, len(entries))
        n_certain = budget // 2 - self.n_sink - self.n_window
        n_heads, n_voters = entries.queries.shape[1:3]
        return two_stages(votes / n_voters, entries, self.n_sink, n_certain, n_heads)


def pool_votes(votes: mx.array, pool: str, kernel: int) -> mx.array:
    """Pool `(..., T)` votes over `kernel` neighbours, stride 1, same length.

    "avg" pads with zeros and divides by the full kernel, "max" ignores what lies outside.
    """
    if kernel == 1:
        return votes
    T, half = votes.shape[-1], kernel // 2
    widths = [(0, 0)] * (votes.ndim - 1) + [(half, half)]
    padded = mx.pad(votes, widths, constant_values=0.0 if pool == "avg" else -mx.inf)
    shifted = [padded[..., i : i + T] for i in range(kernel)]
    if pool == "avg":
        return sum(shifted[1:], shifted[0]) / kernel
    pooled = shifted[0]
    for other in shifted[1:]:
        pooled = mx.maximum(pooled, other)
    return pooled
