"""ScissorHands: keep the entries that many of the last queries found important."""

from dataclasses import dataclass

import mlx.core as mx

from ...entries.entries import Entries
from ...hyperparameters import count
from ..policy import Policy


@dataclass(frozen=True, kw_only=True)
class ScissorHands(Policy):
    """Scores each entry by how many of the last queries give it at least the average weight.

    The average weight is 1/t for a query that sees t entries. How far a weight exceeds the average does not matter. By
    contrast, H2O sums the weights of all queries, SnapKV those of the last queries, and TOVA uses only the last query.

    Attributes:
        obs_window: number of recent queries that vote (the paper's history window). With schedule="block", only queries
            in the recent window vote, because entries that earlier queries saw may have been evicted.
        n_window: number of recent entries that are always kept (the paper's recent window), or a share of the budget.

    Differences from the paper: by default, all layers have the same budget, and counts are averaged over the query
    heads of a GQA group.
    """

    name = "scissorhands"
    summary = "how often the last queries gave an entry more than the average"
    paper = "Liu et al. 2023, arXiv:2305.17118"

    obs_window: int = count(400, least=1)  # type: ignore[misc]
    n_window: int | str = 10

    def score(self, entries: Entries) -> mx.array:
        """Return how many queries give each entry at least the average weight, `(B, n_kv_heads, T)` float32."""
        return entries.above_average
