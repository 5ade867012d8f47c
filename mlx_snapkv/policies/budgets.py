"""How many entries a policy keeps of one prompt, layer by layer."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import mlx.core as mx

from ..entries.selection import select_positions

PYRAMID = "pyramid"
UNLIMITED = 2**30  # entries of a quota that is never reached
STEEPNESS = 20  # PyramidKV's beta: the top layer keeps 1/20 of the mean, if that is enough for sink and window


@dataclass(frozen=True)
class Quota:
    """What one layer keeps per KV head: `entries` in all, the first `n_sink` and the newest `n_window` for certain."""

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


def shape_and_mean(budget: Any) -> tuple[str, Any]:
    """How a budget is shared out among the layers, and the amount that they have on average."""
    shape, colon, mean = budget.rpartition(":") if isinstance(budget, str) else ("", "", budget)
    return shape, int(mean) if colon and mean.isdecimal() else mean


def is_budget(value: object) -> bool:
    """An amount of at least one entry, shared out evenly or as a pyramid."""
    shape, mean = shape_and_mean(value)
    return shape in ("", PYRAMID) and is_amount(mean, least=1)


def is_share(budget: int | str) -> bool:
    return isinstance(shape_and_mean(budget)[1], str)


def mean_entries(budget: int | str, n_prompt: int) -> int:
    """Entries that a budget grants each layer of a prompt, on average."""
    return amount(shape_and_mean(budget)[1], n_prompt)


def layer_entries(budget: int | str, n_prompt: int, n_layers: int, least: int) -> list[int]:
    """Entries by full-attention layer, lowest first; a pyramid falls linearly around the mean, to no fewer than `least`
    (PyramidKV, arXiv:2406.02069, section 4.2)."""
    mean = mean_entries(budget, n_prompt)
    if shape_and_mean(budget)[0] != PYRAMID or n_layers == 1:
        return [mean] * n_layers
    top = min(mean, max(least, mean // STEEPNESS))
    spread = 2 * (mean - top)
    return [top + spread * (n_layers - 1 - i) // (n_layers - 1) for i in range(n_layers)]
