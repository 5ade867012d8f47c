"""ScissorHands: keep the entries that were important to many of the last queries."""

from dataclasses import dataclass

import mlx.core as mx

from ...entries.entries import Entries
from ...hyperparameters import count
from ..policy import Policy


@dataclass(frozen=True, kw_only=True)
class ScissorHands(Policy):
    """Score entries by the number of last queries that give them at least the average weight.

    The average is 1/t for a query that sees t entries. It does not matter how far a weight exceeds the average. By
    contrast, H2O sums the weights of all queries, SnapKV sums those of the last queries, and TOVA uses only the very
    last query.

    Attributes:
        obs_window: number of last queries that are counted (the paper's history window).
        n_window: number of most recent entries, which are always kept (the paper's recent window), or a share of the
            budget.

    Differences from the paper: all layers have equal budgets by default, and counts are averaged over the query heads
    of a GQA group.
    """

    name = "scissorhands"
    summary = "how often the last queries gave an entry more than the average"
    paper = "Liu et al. 2023, arXiv:2305.17118"

    obs_window: int = count(400, least=1)  # type: ignore[misc]
    n_window: int | str = 10

    def score(self, entries: Entries) -> mx.array:
        """Return the number of such queries for each entry, 0 to `obs_window`: `(B, n_kv_heads, T)` float32."""
        return entries.above_average
