"""`eval data`: the real command on data in kvpress' columns."""

import json
import random

import pyarrow
import pytest
from pyarrow import parquet

from mlx_snapkv.cli.progress import StepBars
from mlx_snapkv.demo.questions import make_haystack

KEYDIFF, RANDOM = "keydiff:budget=25%,block=128", "random:budget=4%"


def rows(tokenizer, task, seed=0, wrong=False):
    """Two questions about one document."""
    text, facts = make_haystack(tokenizer, random.Random(seed), 2, 400)
    made = {"context": f"{text}\n\n", "answer_prefix": "", "max_new_tokens": 24, "task": task}
    extra = ["nothing"] if wrong else []
    return [made | {"question": fact.question, "answer": [fact.value, *extra]} for fact in facts]


@pytest.fixture
def data(tmp_path, demo_llama):
    """A folder as RULER's are in kvpress' data set: one length, two tasks, in one parquet file."""
    found = rows(demo_llama[1], "niah_single_1") + rows(demo_llama[1], "qa_1", 1, wrong=True)
    found += rows(demo_llama[1], "vt", 2, wrong=True)
    path = tmp_path / "data" / "512" / "test-00000-of-00001.parquet"
    path.parent.mkdir(parents=True)
    parquet.write_table(pyarrow.Table.from_pylist(found), path)
    return str(tmp_path / "data")


def test_tables_records_and_going_on(call, data, tmp_path):
    """Answers of both settings by task; another policy adds to the file."""
    base = tmp_path / "r"
    args = ["eval", "data", "--data", data, "--output", str(base)]
    code, out, _ = call(*args)
    assert code == 0 and "Question later, 512 tokens" in out
    stored = base.with_suffix(".jsonl").read_text().splitlines()
    assert len(stored) == 1 + 2 * 6
    code, out, err = call(*args, "--policy", RANDOM, "--policy", KEYDIFF, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert base.with_suffix(".jsonl").read_text().splitlines()[: len(stored)] == stored
    assert result["task"] == "data" and len(result["records"]) == 3 * 2 * 6
    found = {(s["method"], s["setting"]): s for s in result["summary"]}
    for setting in ("known", "later"):
        full = found["full cache", setting]
        assert full["by_task"] == {"niah_single_1": 1.0, "qa_1": 1.0, "vt": 0.5}
        assert full["length"] == 512 and full["asked"] == 6
        assert found[RANDOM, setting]["score"] < found[KEYDIFF, setting]["score"]
    page = base.with_suffix(".md").read_text()
    assert "# Questions of a data set" in page and "## Question later, 512 tokens, by task" in page


def test_what_to_ask(call, data):
    args = "--task vt --setting known --documents 1 --json --ignore-chat-template".split()
    code, out, _ = call("eval", "data", "--data", data, *args)
    result = json.loads(out)
    assert code == 0 and result["chat_template"] is False
    assert [(r["task"], r["setting"]) for r in result["records"]] == [("vt", "known")] * 2


@pytest.mark.parametrize(
    "change, args, words",
    [
        ({"context": None}, ["--model", "nowhere"], "row 1: context: Field required"),
        ({}, ["--model", "nowhere", "--output", "/dev/null/r"], "--output /dev/null/r: "),
        ({"context": "long " * 20_000}, [], "the model was trained to"),
    ],
)
def test_a_mistake_is_one_line(call, tmp_path, demo_llama, change, args, words):
    """The first two before the model is loaded."""
    row = rows(demo_llama[1], "vt")[0]
    (tmp_path / "d.jsonl").write_text(json.dumps(row | change))
    code, out, err = call("eval", "data", "--data", str(tmp_path), *args)
    assert (code, out) == (2, "")
    assert words in err and len(err.strip().splitlines()) == 1


def test_it_says_how_long_it_will_take(capsys, monkeypatch):
    """Off a terminal, now and then; documents answered before are not told of."""
    now = 0.0
    monkeypatch.setattr("rich.console.monotonic", lambda: now)
    with StepBars() as bars:
        bars.start("documents", 12)
        bars.done(asked=False)
        for seconds in (60, 20, 20):
            now += seconds
            bars.done()
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "documents 2/12, 60 s, about 600 s left",
        "documents 4/12, 100 s, about 267 s left",
    ]
