"""Paired differences and their intervals."""

import pytest

from mlx_snapkv.measure.intervals import difference, interval


def test_the_difference_is_the_mean_of_pairs_and_of_tasks():
    right, full = [1, 0, 1, 0, 0, 1], [1, 1, 1, 1, 0, 0]
    found = difference(right, full, [0, 0, 1, 1, 2, 2])
    assert found["mean"] == pytest.approx(-1 / 6) and (found["better"], found["worse"]) == (1, 2)
    assert found["low"] <= found["mean"] <= found["high"]
    assert set(difference(full, full, range(6)).values()) == {0}
    # Whole documents are drawn. 1 of 27 samples has the worst document three times, which is more than 2.5%.
    found = difference([0, 0, 1, 1, 1, 1], [1] * 6, [0, 0, 1, 1, 2, 2])
    assert (found["low"], found["high"]) == (-1, 0)
    # Tasks weigh equally, with three questions or with one. Their documents are drawn separately.
    found = difference([1, 1, 1, 0], [0, 0, 0, 0], [0, 1, 2, 0], ["a", "a", "a", "b"])
    assert interval(found, "+.1f", 5, 100) == "+50.0 (+50.0 to +50.0)"


def test_fewer_than_five_documents_have_no_interval():
    assert interval({"mean": 0.5, "low": 0.25, "high": 1}, ".2f", 4) == "0.50"
