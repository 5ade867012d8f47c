"""How far a share of right answers is from another one's to the same questions, and how sure that is."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES = 10_000


@dataclass(frozen=True)
class Difference:
    """A mean difference of right answers, -1 to 1, and its 95% interval.

    Attributes:
        better, worse: questions that only the one, or only the other, answered.
    """

    mean: float
    low: float
    high: float
    better: int
    worse: int

    def __str__(self) -> str:
        if not self.better and not self.worse:
            return "0, the same answers right"
        return f"{self.mean:+.2f} ({self.low:+.2f} to {self.high:+.2f})"


def difference(
    right: Sequence[bool], reference: Sequence[bool], groups: Sequence[object]
) -> Difference:
    """Paired difference of answers to the same questions, bootstrapped over documents.

    The questions about one document are not independent, so whole documents are drawn, with replacement; the
    percentiles of the means of `RESAMPLES` drawings are the interval.

    Args:
        groups: the document of each question.
    """
    changes = np.asarray(right, dtype=float) - np.asarray(reference, dtype=float)
    _, places = np.unique([repr(group) for group in groups], return_inverse=True)
    sums, counts = np.bincount(places, changes), np.bincount(places)
    drawn = np.random.default_rng(0).integers(0, len(sums), (RESAMPLES, len(sums)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    better, worse = int((changes > 0).sum()), int((changes < 0).sum())
    return Difference(float(changes.mean()), float(low), float(high), better, worse)
