"""H2O: keep the heavy hitters, the entries that have received the most attention."""

from dataclasses import dataclass

import mlx.core as mx

from ...entries.entries import Entries
from ...errors import SnapKVError
from ..policy import Policy


@dataclass(frozen=True, kw_only=True)
class H2O(Policy):
    """Keeps the entries that have received the most attention from all queries so far (section 4.1).

    As in the paper (algorithm 1), half of the budget goes to recent entries. Attention is averaged over the query heads
    of a GQA group and accumulates from block to block. The attention that an evicted entry has received is forgotten.
    """

    name = "h2o"
    summary = "most attention received so far, and recent entries"
    paper = "Zhang et al. 2023, arXiv:2306.14048"
    accumulates_attention = True

    n_window: int | str = "50%"

    def score(self, entries: Entries) -> mx.array:
        """Return the attention that each entry has received, `(B, n_kv_heads, T)` float32.

        Raises: SnapKVError: the attention was not counted.
        """
        if entries.received_attention is None:
            raise SnapKVError("h2o needs the attention of all queries: use mlx_snapkv.prefill")
        return entries.received_attention
