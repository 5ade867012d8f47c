"""Compute paired differences between methods, with bootstrapped intervals."""

from collections.abc import Sequence
from typing import Any

import numpy as np

RESAMPLES = 10_000
LEAST_TEXTS = 5  # with fewer texts, bootstrapped intervals are far too narrow, so none is shown


def difference(
    scores: Sequence[float],
    reference: Sequence[float],
    groups: Sequence[object],
    tasks: Sequence[object] | None = None,
) -> dict[str, float]:
    """Return the paired difference between two methods' scores on the same questions, with a bootstrapped interval.

    Differences are averaged over each task's questions, then over the tasks. Questions about the same document are not
    independent, so the bootstrap resamples whole documents within each task.

    Args:
        scores: the method's score for each question.
        reference: the other method's score for each question.
        groups: each question's document.
        tasks: each question's task. By default, all questions share one task.

    Returns:
        The `mean` difference, the bounds `low` and `high` of the 95% interval over `RESAMPLES` resamples, and the
        numbers of questions with a higher (`better`) and a lower (`worse`) score.
    """
    changes = np.subtract(scores, reference, dtype=float)
    documents = np.array([repr(group) for group in groups])
    task_names = np.array([repr(task) for task in tasks or [None] * len(changes)])
    rng = np.random.default_rng(0)
    task_means = []
    resampled_task_means = []
    for name in dict.fromkeys(task_names):
        in_task = task_names == name
        task_means.append(changes[in_task].mean())
        resampled_means = _resampled_means(changes[in_task], documents[in_task], rng)
        resampled_task_means.append(resampled_means)
    low, high = np.percentile(np.mean(resampled_task_means, axis=0), [2.5, 97.5])
    return {
        "mean": float(np.mean(task_means)),
        "low": float(low),
        "high": float(high),
        "better": int((changes > 0).sum()),
        "worse": int((changes < 0).sum()),
    }


def _resampled_means(changes: np.ndarray, documents: np.ndarray, rng: Any) -> np.ndarray:
    """Resample one task's documents with replacement and return the mean change in each resample.

    The result has shape `(RESAMPLES,)`.
    """
    _, document_numbers = np.unique(documents, return_inverse=True)
    change_by_document = np.bincount(document_numbers, changes)
    n_questions_by_document = np.bincount(document_numbers)
    n_documents = len(change_by_document)
    resamples = rng.integers(0, n_documents, (RESAMPLES, n_documents))
    sums = change_by_document[resamples].sum(axis=1)
    return sums / n_questions_by_document[resamples].sum(axis=1)


def interval(figures: dict[str, float], number_format: str, n_texts: int, scale: float = 1) -> str:
    """Format the mean of a `difference` and, if each task has at least `LEAST_TEXTS` documents, its interval.

    Args:
        figures: the difference.
        number_format: a format such as ".3f".
        n_texts: number of documents that were resampled, in the task that has fewest.
        scale: factor for all numbers.
    """
    mean, low, high = (
        format(scale * figures[key], number_format) for key in ("mean", "low", "high")
    )
    return mean if n_texts < LEAST_TEXTS else f"{mean} ({low} to {high})"
