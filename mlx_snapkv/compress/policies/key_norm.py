"""Key norm: keep the entries whose keys have the smallest norm."""

from dataclasses import dataclass

import mlx.core as mx

from ...entries.entries import Entries
from ..policy import Policy


@dataclass(frozen=True, kw_only=True)
class KeyNorm(Policy):
    """Keeps the entries whose keys have the smallest L2 norm, per KV head (section 3)."""

    name = "key_norm"
    summary = "keys of the smallest L2 norm"
    paper = "Devoto et al. 2024, arXiv:2406.11430"

    def score(self, entries: Entries) -> mx.array:
        """Return the negative squared norm of each key, `(B, n_kv_heads, T)` float32."""
        return entries.map_keys(lambda keys: -(keys * keys).sum(axis=-1))
