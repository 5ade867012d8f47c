"""The loop: both settings, going on, questions and methods that don't see each other, and the tables of it all."""

import pytest

from mlx_snapkv import stream_generate
from mlx_snapkv.errors import SnapKVError
from mlx_snapkv.evals import tables
from mlx_snapkv.evals.answering import (
    FULL,
    KNOWN,
    LATER,
    SETTINGS,
    Method,
    require_compression,
    run,
)
from mlx_snapkv.evals.loop import Results
from mlx_snapkv.evals.tasks import RETRIEVAL, SUITE, Needle, Suite
from mlx_snapkv.policies import resolve_policy
from mlx_snapkv.reporting.heatmap import accuracies, write_heatmaps
from mlx_snapkv.reporting.setting import setting as machine

SNAPKV = "snapkv:budget=48,n_window=16,obs_window=16,lookahead=0,on_full=keydiff"
AHEAD = SNAPKV.replace("lookahead=0", "lookahead=3")
BOOK = f"keydiff:budget=96,block=128 then {SNAPKV}".replace(",lookahead=0", "")
RECALLED = {"memory": "recall"}


def method(name, text, **options):
    return Method(name, resolve_policy(policy=text), options)


METHODS = [
    Method(FULL),
    method("snapkv", SNAPKV),
    method("ahead", AHEAD),
    method("recalled", SNAPKV, **RECALLED),
    method("book", BOOK, **RECALLED | {"memory": "recall:file"}),
]


def by(records, *keys):
    """Answers by method, setting and so on."""
    found = {}
    for record in records:
        found.setdefault(tuple(record[key] for key in keys), []).append(record["answer"])
    return found


@pytest.fixture(scope="module")
def asked(demo_tasks):
    """One document of each of two tasks, and a run over them."""
    model, tokenizer = demo_tasks
    suite = Suite(tokenizer, ["single", "two-links"], [768], 1, 3)
    return model, suite, run(model, suite, METHODS, SETTINGS, Results({}))


def test_the_tables_tell_methods_apart(asked):
    """Chains need what nobody votes for; entries that stay, and doubtful tokens that vote, find it."""
    *_, records = asked
    found = {(s["method"], s["setting"]): s for s in tables.summarise(records)}
    for setting in SETTINGS:
        assert found[FULL, setting]["score"] >= 5 / 6
        assert found["snapkv", setting]["score"] < found["recalled", setting]["score"]
        assert found["book", setting]["score"] >= 4 / 6 and found["book", setting]["file_bytes"] > 0
        assert found["snapkv", setting]["difference"]["mean"] < 0
    assert found["snapkv", LATER]["score"] <= found["snapkv", KNOWN]["score"]
    assert found["snapkv", KNOWN]["entries"] == 48
    assert found["snapkv", KNOWN]["kv_bytes"] < found[FULL, KNOWN]["kv_bytes"] / 8
    assert {s["uncompressed"] for s in found.values()} == {0}


@pytest.mark.parametrize("name", ["ahead", "book"])
def test_known_questions_are_answered_as_stream_generate_does(asked, name):
    model, suite, records = asked
    (chosen,) = [m for m in METHODS if m.name == name]
    (_, document), *_ = suite
    for question, answer in zip(
        document.questions, by(records, "method", "setting", "task")[name, KNOWN, "single"]
    ):
        options = {"policy": chosen.policy, **chosen.options}
        responses = stream_generate(model, suite.tokenizer, question.prompt, 60, **options)
        assert answer == "".join(response.text for response in responses)


@pytest.mark.parametrize("chosen", METHODS[2:5:2], ids=lambda m: m.name)
def test_alone_and_together_answers_are_equal(asked, chosen):
    """And neither depends on the setting that was asked before."""
    model, suite, records = asked
    together = by(records, "method", "setting")
    for setting in SETTINGS:
        alone = run(model, suite, [chosen], [setting], Results({}))
        assert [r["answer"] for r in alone] == together[chosen.name, setting]


def test_a_run_goes_on_where_it_was(asked, tmp_path):
    """Only what is missing is asked: the last answers, and one in the middle."""
    model, suite, records = asked
    kept = [r for i, r in enumerate(records[:-2]) if i != 7]
    results = Results(suite.setting(), tmp_path / "r.jsonl")
    for record in kept:
        results.add(record)
    told = []
    again = run(
        model, suite, METHODS, SETTINGS, Results(suite.setting(), tmp_path / "r.jsonl"), told.append
    )
    assert again == records and told == [True, True]
    assert len((tmp_path / "r.jsonl").read_text().splitlines()) == 1 + len(records)
    results = Results(suite.setting(), tmp_path / "r.jsonl")
    assert run(model, suite, METHODS, SETTINGS, results, told.append) == records
    assert told[2:] == [False, False]


def test_a_page_has_a_table_a_setting_and_its_pictures(asked):
    *_, records = asked
    result = machine() | {"summary": tables.summarise(records), "command": "c", "model": "m"}
    page = tables.markdown(result, SUITE, ["r.png"])
    assert "](<r.png>)" in page and "| recalled |" in page
    assert "## Question known, 768 tokens, by task" in page


@pytest.fixture(scope="module")
def needles(demo_llama):
    model, tokenizer = demo_llama
    dataset = Needle(tokenizer, [1024], n_depths=2)
    methods = [
        Method(FULL),
        method("random", "random:budget=3%"),
        method("default", "snapkv:top_k=2000"),
    ]
    return run(model, dataset, methods, SETTINGS, Results({}))


def test_needles_that_random_entries_lose(needles):
    found = {(s["method"], s["setting"]): s for s in tables.summarise(needles)}
    for setting in SETTINGS:
        assert (found[FULL, setting]["score"], found[FULL, setting]["asked"]) == (1, 2)
        random = found["random", setting]
        assert random["score"] < 1 and random["entries"] == 30 and random["uncompressed"] == 0
        assert random["kv_bytes"] < found[FULL, setting]["kv_bytes"]


def test_an_uncompressed_prompt_never_counts_as_the_methods(needles, tmp_path):
    summary = tables.summarise(needles)
    known, _ = tables.tables(summary, RETRIEVAL)
    assert [row[2] for row in known.rows] == ["1.00", "0.00", "not compressed"]
    assert "Not compressed: 2 of 2 prompts of default (the prompt's 10" in known.remark
    own = [r for r in needles if (r["method"], r["setting"]) == ("default", KNOWN)]
    lengths, depths, grid = accuracies(own)
    assert (lengths, depths) == ([1024], [0.0, 1.0])
    assert all(share != share for row in grid for share in row)  # NaN
    paths = write_heatmaps({"records": needles, "model": "demo"} | machine(), tmp_path / "n")
    assert [p.name for p in paths] == [
        f"n-{name}-{setting}.png"
        for name in ("full-cache", "random", "default")
        for setting in SETTINGS
    ]
    assert all(p.read_bytes().startswith(b"\x89PNG") for p in paths)


@pytest.mark.parametrize(
    "policy, words",
    [
        ("snapkv:min_ctx=600", "nothing here: the prompt's 512 tokens are below min_ctx"),
        ("keydiff:budget=0.1%", "budget=0.1% is no entry of this prompt"),
    ],
)
def test_mistakes_show_before_anything_is_measured(policy, words):
    with pytest.raises(SnapKVError, match=words):
        require_compression([Method(FULL), method(policy, policy)], [256, 512])


def test_a_policy_that_compresses_some_lengths_is_measured():
    methods = [method("some", "keydiff:budget=300,min_ctx=400")]
    require_compression(methods, [256, 512])
