"""Paired differences between methods, with bootstrapped intervals."""

from collections.abc import Sequence
from typing import Any

import numpy as np

RESAMPLES = 10_000


def difference(
    scores: Sequence[float],
    reference: Sequence[float],
    groups: Sequence[object],
    tasks: Sequence[object] | None = None,
) -> dict[str, float]:
    """Paired difference of scores for the same questions: a mean over tasks, each weighing the same.

    The questions about one document are not independent, so whole documents are drawn, with replacement, as many of
    each task as it has; the percentiles of the means of `RESAMPLES` drawings are the interval.

    Args:
        groups, tasks: the document and the task of each question.

    Returns: The `mean`, `low` and `high` of its 95% interval, and how many questions are `better` and `worse`.
    """
    changes = np.subtract(scores, reference, dtype=float)
    places = np.array([repr(group) for group in groups])
    names = [repr(task) for task in tasks or [None] * len(changes)]
    own = [np.array(names) == name for name in dict.fromkeys(names)]
    rng = np.random.default_rng(0)
    means, drawings = zip(*(_drawn(changes[some], places[some], rng) for some in own))
    low, high = np.percentile(np.mean(drawings, axis=0), [2.5, 97.5])
    found = {"mean": float(np.mean(means)), "low": float(low), "high": float(high)}
    return found | {"better": int((changes > 0).sum()), "worse": int((changes < 0).sum())}


def _drawn(changes: np.ndarray, groups: np.ndarray, rng: Any) -> tuple[float, np.ndarray]:
    """The mean of one task's changes, and those of its drawings."""
    _, places = np.unique(groups, return_inverse=True)
    sums, counts = np.bincount(places, changes), np.bincount(places)
    drawn = rng.integers(0, len(sums), (RESAMPLES, len(sums)))
    return float(changes.mean()), sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)


def interval(found: dict[str, float], form: str, scale: float = 1) -> str:
    """A difference's mean and its interval."""
    mean, low, high = (format(scale * found[key], form) for key in ("mean", "low", "high"))
    return f"{mean} ({low} to {high})"
