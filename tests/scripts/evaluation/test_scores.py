"""Score tables, built from handwritten records."""

from evaluation.scores import summarise, tables

from mlx_snapkv.measure.methods import FULL_CACHE


def records(task, method, scores, **more):
    """Return one record per document's answer to a question."""
    told = {"entries": None if method == FULL_CACHE else 64, "kv_bytes": None, "reason": None}
    told |= {"answer_tokens": 1, "before": 0}
    fixed = {"task": task, "method": method, "setting": "known", "length": None, "question": 0}
    return [fixed | told | {"document": i, "score": x} | more for i, x in enumerate(scores)]


def test_tasks_weigh_equally():
    full, less = summarise(
        [
            *(r for m, x in ((FULL_CACHE, 1.0), ("less", 0.0)) for r in records("a", m, [x])),
            *(
                r
                for m, x in ((FULL_CACHE, 1.0), ("less", 0.0))
                for r in records("b", m, [0, 0, x, x])
            ),
        ]
    )
    assert full["by_task"] == {"a": 1, "b": 0.5} and full["score"] == 0.75
    assert (less["asked"], less["entries"], less["difference"]["mean"]) == (5, 64, -0.75)
    assert less["difference"]["worse"] == 3 and less["texts"] == 1 and less["kv_bytes"] is None
    _, both = tables([full, less])
    assert both.columns == ["method", "a", "b"] and both.rows[0][1:] == ["100.0", "50.0"]
    _, alone = tables([full])
    assert alone.rows == [["a", "100.0"], ["b", "50.0"]]


def test_uncompressed_answers_have_no_figure():
    full, none = (
        records("a", FULL_CACHE, [1, 1]),
        records("a", "none", [1, 1], reason="fits the budget"),
    )
    some = [*records("a", "some", [1], reason="is short"), *records("a", "some", [1, 0])[1:]]
    (made,) = tables(summarise([*full, *none, *some]))
    assert [row[2] for row in made.rows] == ["100.0", "not compressed", "50.0"]
    assert made.rows[1][3] == "" and made.rows[2][3] == "-50.0"
    assert made.remark.startswith(
        "Not compressed: 2 of 2 prompts of none (fits the budget). "
        "Not compressed: 1 of 2 prompts of some (is short). Before compression: "
    )
