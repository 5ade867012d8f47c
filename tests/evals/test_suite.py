"""Harder tasks in both settings, and what their tables say."""

import numpy as np
import pytest

from mlx_snapkv.evals import score_tables
from mlx_snapkv.evals.asking import FULL, KEYS, SETTINGS, Way, run
from mlx_snapkv.evals.paired import difference
from mlx_snapkv.evals.results import Results
from mlx_snapkv.evals.suite import PAGE, Suite
from mlx_snapkv.policies import resolve_policy

SNAPKV = "snapkv:budget=48,n_sink=4,n_window=16,obs_window=16,min_ctx=0,lookahead=0"
BOOK = f"keydiff:budget=96,block=128 then {SNAPKV}".replace(",lookahead=0", "")


def ways():
    recalled = {"memory": "recall", "verify": "unsure"}
    return [
        Way(FULL),
        Way("snapkv", resolve_policy(policy=SNAPKV)),
        Way("unsure", resolve_policy(policy=SNAPKV), recalled),
        Way("book", resolve_policy(policy=BOOK), {"memory": "recall:file", "verify": "unsure"}),
        # of which a question lets entries give way
        Way(
            "book, alone", resolve_policy(policy="keydiff:budget=96,block=8"), {"memory": "recall"}
        ),
    ]


@pytest.fixture(scope="module")
def asked(demo_tasks):
    """One document of each of two tasks, and a run over them."""
    model, tokenizer = demo_tasks
    suite = Suite(tokenizer, ["single", "two-links"], [768], 1, 3)
    results = Results(suite.setting(), None, KEYS)
    return model, suite, results, run(model, suite, ways(), SETTINGS, results)


def test_every_question_is_asked_of_every_way_in_both_settings(asked):
    *_, records = asked
    assert len(records) == 2 * 5 * 2 * 3
    assert len({tuple(r[key] for key in KEYS) for r in records}) == len(records)


def test_the_tables_tell_ways_apart(asked):
    """Chains need what nobody votes for; entries that stay, and doubtful tokens that vote, find it."""
    *_, records = asked
    found = {(s["way"], s["setting"]): s for s in score_tables.summarise(records, PAGE)}
    for setting in SETTINGS:
        assert found[FULL, setting]["score"] >= 5 / 6
        assert found["snapkv", setting]["score"] < found["unsure", setting]["score"]
        assert found["book", setting]["score"] >= 4 / 6 and found["book", setting]["file_bytes"] > 0
        assert found["snapkv", setting]["difference"]["mean"] < 0
    assert found["snapkv", "later"]["score"] <= found["snapkv", "known"]["score"]
    assert found["snapkv", "known"]["entries"] == 48
    assert found["snapkv", "known"]["kv_bytes"] < found[FULL, "known"]["kv_bytes"] / 8


class Backwards(Suite):
    """The same documents, their questions from last to first."""

    def paper(self, *place):
        paper = super().paper(*place)
        return type(paper)(paper.questions[::-1], paper.n_shared)


def test_questions_do_not_see_each_other(asked):
    model, suite, _, records = asked
    backwards = Backwards(suite.tokenizer, ["single"], [768], 1, 3)
    again = run(model, backwards, ways(), SETTINGS, Results({"task": "suite"}, None, KEYS))
    for way in ways():
        for setting in SETTINGS:
            here = (way.name, setting, "single")
            asked_so = [
                [r["answer"] for r in found if (r["way"], r["setting"], r["task"]) == here]
                for found in (records, again)
            ]
            assert asked_so[0] == asked_so[1][::-1], here


def test_a_run_goes_on_where_it_was(asked, tmp_path):
    model, suite, _, records = asked
    path = tmp_path / "r.jsonl"
    results = Results(suite.setting(), path, KEYS)
    for record in records[:-1]:
        results.add(record)
    again = run(model, suite, ways(), SETTINGS, Results(suite.setting(), path, KEYS))
    assert [r["answer"] for r in again] == [r["answer"] for r in records]


def test_pages_and_pictures(asked, tmp_path):
    *_, records = asked
    summary = score_tables.summarise(records, PAGE)
    machine = {"processor": "p", "cores": 1, "system": "s", "device": "cpu", "blas": "b"}
    result = {
        "records": records,
        "summary": summary,
        "command": "c",
        "commit": "0",
        "model": "m",
        "date": "d",
    }
    result |= {"machine": machine, "versions": {"mlx": "1"}}
    page = score_tables.markdown(result, PAGE, "r.png")
    assert "## Question known, 768 tokens, by task" in page and "| unsure |" in page
    score_tables.write_plot(result, PAGE, tmp_path / "r.png")
    assert (tmp_path / "r.png").stat().st_size > 5000


def test_the_difference_is_the_mean_of_pairs():
    right, full = [1, 0, 1, 0, 0, 1], [1, 1, 1, 1, 0, 0]
    found = difference(right, full, [0, 0, 1, 1, 2, 2])
    assert found.mean == pytest.approx(-1 / 6) and (found.better, found.worse) == (1, 2)
    assert found.low <= found.mean <= found.high
    same = difference(full, full, range(6))
    assert (same.low, same.high) == (0, 0) and same.told() == "0, each scored the same"


def test_tasks_weigh_the_same():
    """Three questions of one task and one of another: the mean of 1 and 0; their documents are drawn apart."""
    found = difference([1, 1, 1, 0], [0, 0, 0, 0], [0, 1, 2, 0], ["a", "a", "a", "b"])
    assert (found.mean, found.low, found.high) == (0.5, 0.5, 0.5)
    assert found.told(100) == "+50.0 (+50.0 to +50.0)"


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
