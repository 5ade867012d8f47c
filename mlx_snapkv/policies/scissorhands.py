"""ScissorHands: entries that mattered often to the last queries will matter to the next."""

from dataclasses import dataclass

import mlx.core as mx

from ..entries.entries import Entries
from .base import Policy, count


@dataclass(frozen=True, kw_only=True)
class ScissorHands(Policy):
    """How many of the last queries give an entry at least the average weight, 1/t of the t entries that they see.

    Only whether a weight exceeds the average counts, not by how much. H2O sums the weights of all queries, SnapKV those
    of the last ones, and TOVA takes the very last's.

    Attributes:
        obs_window: the last queries, whose weights are counted (the paper's history window).
        n_window: most recent entries, always kept (the paper's recent window): a number, or a share of the budget.

    Differs from the paper in that all layers may have the same budget, and that counts are averaged over the query
    heads of a GQA group.
    """

    name = "scissorhands"
    summary = "how often the last queries gave an entry more than the average"
    paper = "Liu et al. 2023, arXiv:2305.17118"

    obs_window: int = count(400, least=1)  # type: ignore[misc]
    n_window: int | str = 10

    def score(self, entries: Entries) -> mx.array:
        """`(B, n_kv_heads, T)` float32: queries, from 0 to `obs_window`."""
        return entries.above_average
