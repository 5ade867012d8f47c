"""SnapKV: the prompt's last queries vote for the entries that the answer will need."""

import math
from dataclasses import dataclass

import mlx.core as mx

from ...entries.entries import Entries
from ...errors import SnapKVError
from ...hyperparameters import choice, count, entry_count, smallest_budget
from ..policy import Policy

# pool="forward" compares the votes of the prompt's last 32 queries with all earlier votes, and does the same for its
# last 64 queries.
LATEST_COUNTS = (32, 64)


@dataclass(frozen=True, kw_only=True)
class SnapKV(Policy):
    """Keeps a sink, a recent window and the `top_k` entries with the most votes. By default, evicts once after prefill.

    Attributes:
        top_k: number of entries per KV head to keep by vote.
        n_sink: number of initial entries that are always kept.
        n_window: number of recent entries that are always kept, or a share of the budget ("25%").
        budget: total number of entries to keep, or a share of the prompt ("25%"). Set either this or `top_k`. Defaults
            to the smallest budget that fits the sink, the window and `top_k` entries.
        obs_window: number of queries at the end of the prompt that vote (the paper's L_obs).
        pool_kernel: number of adjacent entries over which an entry's votes are pooled, including the entry itself
            (section 4.1). A good value is about the length in tokens of the names or codes to look up. 1 disables
            pooling.
        pool: "avg" and "max" pool over neighbours on both sides, as in the paper, and need an odd `pool_kernel`.
            "forward" scores an entry by the largest of three numbers: its mean vote, and two contrasts, which are meant
            for looking up exact names or codes. A contrast is the mean vote of the prompt's last 32 or 64 queries minus
            the mean vote of the earlier queries. It is averaged over the entry and the `pool_kernel - 1` entries before
            it, because a model looking up a code attends to the words before the code and continues from there. Entries
            that every query attends to, such as line breaks, have no contrast.
        lookahead: number of answer tokens to decode with all entries before compressing, so that their queries vote
            too.
        min_ctx: minimum prompt length in tokens. Nothing is evicted from shorter prompts.
        prefill_chunk: maximum number of tokens per prefill chunk. None means `prefill_step_size`.
        on_full: what to do when the recent window is full. "grow" keeps all of the answer's entries on top of the
            budget, as in the paper. "slide" evicts the window's oldest entry. That keeps the cache's shape constant
            during decoding, but changes the answer more.
        schedule, block: see `Policy`. Papers that compare against SnapKV use "block".

    Differences from the paper: a sink and a recent window are always kept (the paper keeps its observation window).
    pool="forward" is new. Only the entries between the sink and the window are pooled, so votes for the sink and the
    window don't leak into them. The paper's settings are pool="avg", pool_kernel=7, obs_window=32, n_window=32,
    n_sink=0, lookahead=0.
    """

    name = "snapkv"
    summary = "the prompt's last queries vote, pooled over neighbours"
    paper = "Li et al. 2024, arXiv:2404.14469"

    top_k: int = count(4096)
    n_sink: int = 4
    n_window: int | str = entry_count("25%", least=1)
    budget: int | str = None  # type: ignore[assignment]  # set in `__post_init__`
    obs_window: int = count(256, least=1)  # type: ignore[misc]
    pool_kernel: int = count(16, least=1, most=255)
    min_ctx: int = 0  # type: ignore[misc]
    prefill_chunk: int | None = count(None, least=1)  # type: ignore[misc]
    pool: str = choice("forward", "avg", "max")
    lookahead: int = count(0, most=256)  # type: ignore[misc]
    on_full: str = choice("grow", "slide")  # type: ignore[misc]
    schedule: str = "once"  # type: ignore[misc]

    def __post_init__(self):
        """Check options that depend on each other, and derive `budget` from `top_k` or vice versa."""
        super().__post_init__()
        fits_pool = self.pool == "forward" or self.pool_kernel % 2 == 1
        self._require("pool_kernel", fits_pool, f"odd with pool={self.pool}")
        if self.on_full == "slide":
            self._require("schedule", self.schedule == "once", "once with on_full=slide")
        # `budget` and `top_k` determine each other, unless `budget` is a share of the prompt.
        if self.budget is None:
            budget = smallest_budget(self.top_k, self.n_sink, self.n_window)
            leaves_room_for_top_k = budget is not None
            self._require("n_window", leaves_room_for_top_k, "less than all of the budget")
            object.__setattr__(self, "budget", budget)
            super().__post_init__()  # also checks the derived budget
        else:
            self._derive_top_k()

    def _derive_top_k(self) -> None:
        """Set `top_k` to the number of entries that `budget` leaves to be chosen by vote.

        If the budget is a share of the prompt, `top_k` keeps its default and is not used.

        Raises: SnapKVError: `top_k` is set and contradicts the budget.
        """
        default_top_k = type(self).top_k
        derived_top_k = default_top_k
        if isinstance(self.budget, int):
            quota = self._quota_of(self.budget)
            derived_top_k = self.budget - quota.n_sink - quota.n_window
        if self.top_k not in (default_top_k, derived_top_k):
            raise SnapKVError("snapkv options top_k and budget say the same: give only one")
        object.__setattr__(self, "top_k", derived_top_k)

    @property
    def implied_option(self) -> str | None:  # type: ignore[override]
        """Return the option ("budget" or "top_k") that follows from the other, so the policy's string omits it."""
        if not isinstance(self.budget, int):
            return None  # a share of the prompt, which implies no `top_k`
        budget_of_top_k = smallest_budget(self.top_k, self.n_sink, self.n_window)
        return "budget" if self.budget == budget_of_top_k else "top_k"

    def score(self, entries: Entries) -> mx.array:
        """Return the entries' scores, `(B, n_kv_heads, T)` float32.

        With pool="forward", a score is the entry's mean vote or, if larger, its largest pooled contrast. With "avg" or
        "max", it is the pooled sum of the entry's votes. In the sink and the window, nothing is pooled, and contrasts
        are ignored.
        """
        quota = entries.quota or self.quota(len(entries))
        # The entries between the sink and the window, which are kept or evicted by vote.
        middle = slice(quota.n_sink, len(entries) - quota.n_window)
        if self.pool == "forward":
            votes, votes_to_pool = mean_and_contrasts(entries)
        else:
            votes = votes_to_pool = entries.votes
        is_middle_empty = middle.stop <= middle.start
        if is_middle_empty:
            return votes
        middle_scores = pool_votes(votes_to_pool[..., middle], self.pool, self.pool_kernel)
        if self.pool == "forward":
            largest_contrast = middle_scores.max(axis=0)
            middle_scores = mx.maximum(votes[..., middle], largest_contrast)
        sink_scores, window_scores = votes[..., : middle.start], votes[..., middle.stop :]
        return mx.concatenate([sink_scores, middle_scores, window_scores], axis=-1)


def mean_and_contrasts(entries: Entries) -> tuple[mx.array, mx.array]:
    """Return each entry's mean vote, `(B, n_kv_heads, T)` float32, and its `n` contrasts, `(n, B, n_kv_heads, T)`.

    A query's vote is the attention that it gives an entry, averaged over the query heads of a GQA group.

    The last queries are the prompt's last 32 or 64 queries and all lookahead queries. Each of these two sets gives one
    contrast, `max(0, mean vote of the last queries - mean vote of the earlier queries)`, unless there are no earlier
    queries.

    The returned mean vote is `(mean vote of all queries + mean vote of the last queries) / 2`, with the smaller set of
    last queries. Without any contrast, both results are the mean vote of all queries.
    """
    indices = entries.voters.indices
    n_queries = len(indices)
    n_lookahead = max(0, indices.stop - len(entries))  # lookahead tokens have no entries
    counts_with_lookahead = [count + n_lookahead for count in LATEST_COUNTS]
    latest_counts = [count for count in counts_with_lookahead if count < n_queries]
    if not latest_counts:
        mean = entries.votes / n_queries
        return mean, mean[None]
    latest_votes = entries.latest_votes(*latest_counts)
    all_votes = entries.votes
    latest_means: list[mx.array] = []
    contrasts: list[mx.array] = []
    for votes, n_latest in zip(latest_votes, latest_counts):
        latest_mean = votes / n_latest
        earlier_mean = (all_votes - votes) / (n_queries - n_latest)
        latest_means.append(latest_mean)
        contrasts.append(mx.maximum(latest_mean - earlier_mean, 0))
    mean = (all_votes / n_queries + latest_means[0]) / 2
    return mean, mx.stack(contrasts)


def pool_votes(votes: mx.array, pool: str, kernel: int) -> mx.array:
    """Pool votes `(..., T)` over windows of `kernel` entries.

    Windows are centred on the entry or, for "forward", end at it. At the ends, "max" ignores missing neighbours, and
    averages count them as zeros.
    """
    if kernel == 1:
        return votes
    n_before = kernel - 1 if pool == "forward" else kernel // 2
    n_after = kernel - 1 - n_before
    pad_widths = [(0, 0)] * (votes.ndim - 1) + [(n_before, n_after)]
    pad_value = -mx.inf if pool == "max" else 0.0
    padded = mx.pad(votes, pad_widths, constant_values=pad_value)
    # A view whose last axis is the entry's window. Neighbouring windows are one element apart.
    strides = [math.prod(padded.shape[axis + 1 :]) for axis in range(padded.ndim)]
    windows = mx.as_strided(padded, (*votes.shape, kernel), [*strides, 1])
    return windows.max(axis=-1) if pool == "max" else windows.sum(axis=-1) / kernel
