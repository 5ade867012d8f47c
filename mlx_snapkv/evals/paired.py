"""How far the score of some answers is from another one's to the same questions, and how sure that is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000


@dataclass(frozen=True)
class Difference:
    """A mean difference of scores, -1 to 1, and its 95% interval.

    Attributes:
        better, worse: questions that the one answered better than the other, or less well.
    """

    mean: float
    low: float
    high: float
    better: int
    worse: int

    def told(self, points: int = 1) -> str:
        """As tables show it, `points` being what full marks are."""
        if not self.better and not self.worse:
            return "0, each scored the same"
        form = "+.2f" if points == 1 else "+.1f"
        mean, low, high = (format(points * x, form) for x in (self.mean, self.low, self.high))
        return f"{mean} ({low} to {high})"


def difference(
    scores: Sequence[float],
    reference: Sequence[float],
    groups: Sequence[object],
    tasks: Sequence[object] | None = None,
) -> Difference:
    """Paired difference of scores for the same questions, bootstrapped over documents.

    The questions about one document are not independent, so whole documents are drawn, with replacement; the
    percentiles of the means of `RESAMPLES` drawings are the interval. With tasks, as many documents are drawn of each
    as it has, and the means are over tasks, each weighing the same.

    Args:
        groups: the document of each question.
        tasks: the task of each question.
    """
    changes = np.asarray(scores, dtype=float) - np.asarray(reference, dtype=float)
    better, worse = int((changes > 0).sum()), int((changes < 0).sum())
    names = [repr(task) for task in tasks or [None] * len(changes)]
    rng = np.random.default_rng(0)
    parts = [
        _drawn(changes[own], [repr(groups[i]) for i in own], rng)
        for own in ([i for i, n in enumerate(names) if n == name] for name in dict.fromkeys(names))
    ]
    means, drawings = zip(*parts)
    low, high = np.percentile(np.mean(drawings, axis=0), [2.5, 97.5])
    return Difference(float(np.mean(means)), float(low), float(high), better, worse)


def _drawn(changes: np.ndarray, groups: list[str], rng) -> tuple[float, np.ndarray]:
    """The mean of one task's changes, and those of its drawings."""
    if not changes.any():
        return 0.0, np.zeros(RESAMPLES)
    _, places = np.unique(groups, return_inverse=True)
    sums, counts = np.bincount(places, changes), np.bincount(places)
    drawn = rng.integers(0, len(sums), (RESAMPLES, len(sums)))
    return float(changes.mean()), sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
