"""Paired differences, their intervals, and the tables of lm-evaluation-harness' records made by hand."""

import numpy as np
import pytest

from mlx_snapkv.evals.answering import FULL
from mlx_snapkv.evals.lm_table import MEAN, summarise, table
from mlx_snapkv.evals.tables import difference


def record(task, method, values, metrics=None, **more):
    """A record of documents with these values of `acc`."""
    documents = [
        {"document": i, "filter": "none", "answers": ["x"], "acc": x} for i, x in enumerate(values)
    ]
    found = metrics or {"acc,none": sum(values) / len(values)}
    told = {"prompts": len(values), "entries": 64, "uncompressed": 0, "reason": None}
    if method == FULL:
        told |= {"prompts": 0, "entries": None}
    given = {"task": task, "method": method, "n": len(values), "metrics": found}
    return given | {"documents": documents} | told | more


def rows(*records):
    return [tuple(row) for row in table(summarise(records)).rows]


def test_a_row_a_method_with_the_paired_difference():
    full, less = record("a", FULL, [1.0, 1.0, 0.0]), record("a", "less", [1.0, 0.0, 0.0])
    (first, second) = rows(full, less)
    assert first == ("a, acc", FULL, "3", "0.667", "", "all")
    assert second[:4] == ("", "less", "3", "0.333") and second[4].startswith("-0.33 (-1.00 to ")
    assert second[5] == "64"
    (_, same) = rows(full, record("a", "same", [1.0, 1.0, 0.0]))
    assert same[4] == "0, each scored the same"


def test_means_are_over_tasks_that_share_a_metric():
    tasks = {"a": [1.0], "b": [0.0, 0.0, 1.0, 1.0]}
    records = [record(task, FULL, values) for task, values in tasks.items()]
    records.append(record("c", FULL, [1.0], {"other,none": 5.0}))
    found = {(row["task"], row["metric"]): row for row in summarise(records)}
    mean = found[MEAN, "acc,none"]
    assert (mean["value"], mean["n"]) == (0.75, 5) and (MEAN, "other,none") not in found
    assert rows(*records)[-1][:4] == ("mean, acc", FULL, "5", "0.750")


@pytest.mark.parametrize("metrics", ({"acc,none": 0.9}, {"other,none": 3.0}))
def test_no_difference_of_metrics_that_are_no_means_over_documents(metrics):
    full, less = (record("a", method, [1.0, 0.0], metrics) for method in (FULL, "less"))
    assert [row[4] for row in rows(full, less)] == ["", ""]


def test_rulers_metrics_of_lengths_that_no_prompt_has_are_left_out():
    values = {"metrics": {"4096,none": -1.0, "2048,none": 0.5, "corr,none": -1.0}}
    found = rows(record("a", FULL, [0.5], **values))
    assert [row[0] for row in found] == ["a, 2048", "a, corr"]


def test_what_was_not_compressed_has_no_figure():
    left = {"entries": None, "uncompressed": 2, "reason": "fits the budget"}
    full, none = record("a", FULL, [1.0, 1.0]), record("a", "none", [1.0, 1.0], **left)
    some = record("a", "some", [1.0, 0.0], uncompressed=1, reason="is short")
    made = table(summarise([full, none, some]))
    assert [row[3] for row in made.rows] == ["1.000", "not compressed", "0.500"]
    assert made.rows[1][4] == ""
    assert made.remark == (
        "Not compressed: 2 of 2 prompts of a by none (fits the budget). "
        "Not compressed: 1 of 2 prompts of a by some (is short)."
    )


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
