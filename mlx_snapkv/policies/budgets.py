"""How many entries a policy keeps of one prompt."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import mlx.core as mx

from ..entries.selection import select_positions

UNLIMITED = 2**30  # entries of a quota that is never reached


@dataclass(frozen=True)
class Quota:
    """What each layer keeps per KV head: `entries` in all, the first `n_sink` and the newest `n_window` for certain."""

    entries: int
    n_sink: int
    n_window: int

    def shrunk(self) -> Quota:
        """The same entries; where sink and window don't fit, they share half of them in their proportion."""
        both, half = self.n_sink + self.n_window, max(1, self.entries // 2)
        if both <= self.entries:
            return self
        n_window = max(1, half * self.n_window // both) if self.n_window else 0
        return Quota(self.entries, half - n_window, n_window)

    def select(self, scores: mx.array) -> mx.array:
        top_k = self.entries - self.n_sink - self.n_window
        return select_positions(scores, n_sink=self.n_sink, top_k=top_k, n_window=self.n_window)


def is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_amount(value: Any, least: int = 0) -> bool:
    """A whole number from `least`, or a share such as "25%" of more than 0 and at most 100."""
    return 0 < _share(value) <= 1 if isinstance(value, str) else is_whole(value) and value >= least


def amount(value: int | str, whole: int) -> int:
    """The entries that a number or share of `whole` stands for; a share is rounded down."""
    return int(_share(value) * whole + 1e-9) if isinstance(value, str) else int(value)


def smallest_budget(top_k: int, n_sink: int, n_window: int | str) -> int | None:
    """The smallest budget of which `top_k` entries are chosen; None if the window is all of it."""
    fixed = n_sink + top_k
    if not isinstance(n_window, str):
        return fixed + n_window
    share = _share(n_window)
    if share == 1:
        return None
    budget = int((fixed - 1) / (1 - share))
    while budget - amount(n_window, budget) < fixed:
        budget += 1
    return budget


def _share(text: str) -> float:
    """0.25 of "25%"; NaN of what is no share."""
    match = re.fullmatch(r"(\d*\.?\d+)%", text)
    return float(match[1]) / 100 if match else math.nan
