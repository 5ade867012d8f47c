"""TOVA: keep the entries that the last token attends to most."""

from dataclasses import dataclass

import mlx.core as mx

from ...entries.entries import Entries
from ..policy import Policy


@dataclass(frozen=True, kw_only=True)
class TOVA(Policy):
    """Keeps the entries that the last query attends to most, averaged over all heads (section 3.2).

    As a result, all heads of a layer keep the same positions.
    """

    name = "tova"
    summary = "the last query's attention, one set for all heads of a layer"
    paper = "Oren et al. 2024, arXiv:2401.06104"
    obs_window = 1
    heads_agree = True

    n_window: int | str = 1

    def score(self, entries: Entries) -> mx.array:
        """Return the last query's attention, averaged over the layer's heads, `(B, n_kv_heads, T)` float32."""
        votes = entries.votes
        return mx.broadcast_to(votes.mean(axis=1, keepdims=True), votes.shape)
