"""How training judges itself."""

from __future__ import annotations

import math

import numpy as np

from .batches import ANSWER


def exact_match(correct: np.ndarray, kinds: np.ndarray) -> float:
    """Share of answers of which every token is predicted; nan without answers."""
    hits = []
    for row_ok, row_kind in zip(correct, kinds):
        answer = np.flatnonzero(np.diff(np.concatenate([[0], row_kind == ANSWER, [0]])))
        hits += [row_ok[a:b].all() for a, b in zip(answer[::2], answer[1::2])]
    return float(np.mean(hits)) if hits else math.nan
