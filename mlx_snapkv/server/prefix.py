"""Prefixes: tokens that the model has read, and the caches that later prompts can continue from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

# A prefix covers (can replace) another one if at most this share of the other's tokens would have to be read again.
MAX_REREAD_SHARE = 1 / 16


@dataclass(eq=False)
class Prefix:
    """Tokens that the model has read, with their caches in memory or in a file.

    Attributes:
        ids: token ids, `(n,)`, uint32.
        is_trimmable: whether the caches can be trimmed to any length.
        caches: one cache per layer. Empty if they are only in the file.
        path: file with the caches. Unused if they are only in memory.
    """

    ids: np.ndarray
    is_trimmable: bool
    caches: list = field(default_factory=list)
    path: Path = Path()

    def n_shared(self, ids: np.ndarray) -> int:
        """Return the length of the common prefix with `ids`."""
        n_compared = min(len(ids), len(self.ids))
        is_same = ids[:n_compared] == self.ids[:n_compared]
        # `argmin` finds the first False. Append a False in case all ids are equal.
        return int(np.argmin(np.append(is_same, False)))

    def n_usable(self, ids: np.ndarray) -> int:
        """Return how many tokens of the prompt `ids` the caches can provide.

        Caches that can't be trimmed are usable only for prompts that start with the whole prefix.
        """
        n_shared = self.n_shared(ids)
        shares_whole_prefix = n_shared == len(self.ids)
        return n_shared if self.is_trimmable or shares_whole_prefix else 0

    def covers(self, other: Prefix) -> bool:
        """Return whether this prefix can replace `other`: at most 1/16 of `other`'s tokens would be read again.

        Prefixes that can't be trimmed never cover others, and are never covered.
        """
        if not (self.is_trimmable and other.is_trimmable):
            return False
        n_other = len(other.ids)
        n_reread = n_other - self.n_shared(other.ids)
        return n_reread <= MAX_REREAD_SHARE * n_other


def longest_prefix(prefixes: Iterable[Prefix], ids: np.ndarray) -> tuple[int, Prefix | None]:
    """Return the prefix that provides the most tokens of the prompt `ids`, as (n_tokens, prefix).

    Returns: `(0, None)` if no prefix provides any.
    """
    n_served = 0
    best: Prefix | None = None
    for prefix in prefixes:
        n_usable = prefix.n_usable(ids)
        if n_usable > n_served:
            n_served = n_usable
            best = prefix
    return n_served, best


def as_ids(tokens: list[int]) -> np.ndarray:
    """Convert tokens to a uint32 array, `(n,)`."""
    return np.array(tokens, np.uint32)
