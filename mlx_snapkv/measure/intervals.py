"""What was measured, summed up as JSON and shown as tables; paired differences and their intervals."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .tables import Table, as_page

RESAMPLES = 10_000
Record = dict[str, Any]
Summary = list[Record]


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


def grouped(rows: list[Record], *keys: str) -> dict[tuple, list[Record]]:
    """Rows by their values of some keys, in the order in which these come first."""
    found: dict[tuple, list[Record]] = {}
    for row in rows:
        found.setdefault(tuple(row[key] for key in keys), []).append(row)
    return found


def table_of(
    title: str, remark: str, columns: dict[str, Callable[[Record], str]], rows: Summary
) -> Table:
    return Table(title, remark, [*columns], [[cell(s) for cell in columns.values()] for s in rows])


class Page(NamedTuple):
    """How one kind of records is summed up and shown; the remark says what its figures mean."""

    title: str
    remark: str
    summarise: Callable[[list[Record]], Summary]
    tables: Callable[[Summary], list[Table]]

    def markdown(self, result: Record, pictures: Sequence[str] = ()) -> str:
        """A page of all tables, and of the pictures with these names."""
        made = self.tables(result["summary"])
        return as_page(self.title, result, self.remark, made, pictures)
