"""Paired differences and their intervals."""

import numpy as np
import pytest

from mlx_snapkv.evals.tables import difference


def test_the_difference_is_the_mean_of_pairs():
    right, full = [1, 0, 1, 0, 0, 1], [1, 1, 1, 1, 0, 0]
    found = difference(right, full, [0, 0, 1, 1, 2, 2])
    assert found.mean == pytest.approx(-1 / 6) and (found.better, found.worse) == (1, 2)
    assert found.low <= found.mean <= found.high
    same = difference(full, full, range(6))
    assert (same.low, same.high) == (0, 0) and same.text() == "0, each scored the same"


def test_tasks_weigh_the_same():
    """Three questions of one task and one of another: the mean of 1 and 0; their documents are drawn apart."""
    found = difference([1, 1, 1, 0], [0, 0, 0, 0], [0, 1, 2, 0], ["a", "a", "a", "b"])
    assert (found.mean, found.low, found.high) == (0.5, 0.5, 0.5)
    assert found.text(100) == "+50.0 (+50.0 to +50.0)"


def test_the_interval_covers_the_truth():
    """Of 200 samples of 40 documents, the 95% interval holds the true difference about as often."""
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(200):
        full = rng.random(80) < 0.9
        right = full & (rng.random(80) < 0.8)
        found = difference(right, full, np.repeat(np.arange(40), 2))
        inside += found.low <= -0.18 <= found.high
    assert 170 <= inside <= 199
