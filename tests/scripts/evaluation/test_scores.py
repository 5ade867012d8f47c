"""The tables of scores, of lm-evaluation-harness' records made by hand."""

import pytest
from evaluation.scores import tables

from mlx_snapkv.measure.methods import FULL

pytest.importorskip("lm_eval", reason="needs pip install -e '.[dev]'")

from evaluation.lm import summarise


def record(task, method, values, metrics=None, **more):
    """A record of documents with these values of `acc`."""
    documents = [
        {"document": i, "filter": "none", "acc": x, "4096": -1.0} for i, x in enumerate(values)
    ]
    found = metrics or {"acc,none": sum(values) / len(values)}
    told = {"entries": None if method == FULL else 64, "uncompressed": 0, "reason": None}
    given = {"task": task, "method": method, "metrics": found, "documents": documents}
    return given | told | more


def test_metrics_that_are_means_over_documents_are_tasks():
    other = {"corpus,none": 5.0, "4096,none": -1.0}
    records = [
        *(record("a", m, [x]) for m, x in ((FULL, 1.0), ("less", 0.0))),
        *(record("b", m, [0.0, 0.0, x, x]) for m, x in ((FULL, 1.0), ("less", 0.0))),
        *(record("c", m, [1.0], other) for m in (FULL, "less")),
    ]
    full, less = summarise(records)
    assert full["by_task"] == {"a, acc": 1, "b, acc": 0.5} and full["score"] == 0.75
    assert (less["asked"], less["entries"], less["difference"]["mean"]) == (5, 64, -0.75)
    assert less["difference"]["worse"] == 3 and less["kv_bytes"] is None
    _, both = tables([full, less])
    assert both.columns == ["method", "a, acc", "b, acc"] and both.rows[0][1:] == ["100.0", "50.0"]
    _, alone = tables([full])
    assert alone.rows == [["a, acc", "100.0"], ["b, acc", "50.0"]]


def test_what_was_not_compressed_has_no_figure():
    left = {"entries": None, "uncompressed": 2, "reason": "fits the budget"}
    full, none = record("a", FULL, [1.0, 1.0]), record("a", "none", [1.0, 1.0], **left)
    some = record("a", "some", [1.0, 0.0], uncompressed=1, reason="is short")
    (made,) = tables(summarise([full, none, some]))
    assert [row[2] for row in made.rows] == ["100.0", "not compressed", "50.0"]
    assert made.rows[1][3] == "" and made.rows[2][3].startswith("-50.0 (-100.0 to ")
    assert made.remark == (
        "Not compressed: 2 of 2 prompts of none (fits the budget). "
        "Not compressed: 1 of 2 prompts of some (is short)."
    )
