import json
import random
import sys
from functools import partial

import pytest
from evaluation import lm_command
from lm_tasks import write_tasks

from mlx_snapkv.demo.questions import make_haystack

KEYDIFF, RANDOM = "keydiff:budget=25%,block=128", "random:budget=4%"


@pytest.fixture
def data(tmp_path, demo_llama):
    """A folder as RULER's are in kvpress' data set: one length, three tasks of two questions, in one file."""
    found = []
    tasks = ["niah_single_1"], ["qa_1", "nothing"], ["vt", "nothing"]
    for seed, (task, *extra) in enumerate(tasks):
        text, facts = make_haystack(demo_llama[1], random.Random(seed), 2, 400)
        row = {"context": f"{text}\n\n", "answer_prefix": "", "max_new_tokens": 24, "task": task}
        found += [row | {"question": f.question, "answer": [f.value, *extra]} for f in facts]
    path = tmp_path / "data" / "512" / "rows.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text("\n".join(map(json.dumps, found)))
    return str(tmp_path / "data")


def test_tables_and_records_of_a_data_set(call, data, tmp_path):
    """Answers of both settings by task."""
    base = tmp_path / "r"
    args = ["data", "--data", data, "--output", str(base)]
    code, out, err = call(*args, "--policy", RANDOM, "--policy", KEYDIFF, "--json")
    assert code == 0, err
    result = json.loads(out)
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
    code, out, _ = call("data", "--data", data, *args)
    result = json.loads(out)
    assert code == 0 and result["chat_template"] is False
    assert [(r["task"], r["setting"]) for r in result["records"]] == [("vt", "known")] * 2


POLICY = "streaming_llm:budget=25%"


@pytest.fixture(scope="module")
def folder(demo_llama, tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"), demo_llama[1])


@pytest.fixture
def lm(call, folder, monkeypatch):
    """`lm` without an index of lm-evaluation-harness' own tasks, which takes seconds."""
    manager = pytest.importorskip("lm_eval.tasks").TaskManager
    without = partial(manager, include_defaults=False)
    monkeypatch.setattr("evaluation.lm.TaskManager", without)
    return partial(call, "lm", "--include-path", str(folder))


def without_models(monkeypatch):
    def load(*args):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(lm_command, "load_model", load)


def test_the_harness_runs_with_the_full_cache_and_each_policy(lm, tmp_path, monkeypatch):
    asked = ["--tasks", "facts,choices", "--limit", "3", "--output", str(tmp_path / "r")]
    code, out, err = lm(*asked, "--policy", POLICY)
    assert code == 0 and "documents 12/12" in err
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "full cache 6 100.0 all" in lines and "method facts, exact_match choices, acc" in lines
    assert "full cache 100.0 100.0" in lines
    assert sum(line.startswith(POLICY) for line in lines) == 2
    result = json.loads((tmp_path / "r.json").read_text())
    assert [len(record["documents"]) for record in result["records"]] == [3] * 4
    assert "| full cache | 6 | 100.0 |" in (tmp_path / "r.md").read_text()
    stored = (tmp_path / "r.jsonl").read_bytes()
    again = lm(*asked, "--policy", POLICY)
    assert again[:2] == (0, out.replace("wrote", "replaced"))
    assert (tmp_path / "r.jsonl").read_bytes() == stored
    without_models(monkeypatch)
    code, _, err = lm(*asked, "--seed", "3")
    assert code == 2 and "r.jsonl belongs to another run, with seed 123 instead of 3" in err


@pytest.mark.parametrize(
    "args, message",
    (
        (
            ["--tasks", "facts", "--include-path", "nowhere"],
            "--include-path nowhere is not a folder",
        ),
        (["--tasks", ","], "--tasks is empty"),
    ),
)
def test_mistakes_are_one_line_before_the_model_is_loaded(lm, monkeypatch, args, message):
    without_models(monkeypatch)
    code, out, err = lm(*args)
    assert (code, out) == (2, "") and message in err.splitlines()[-1]


def test_without_the_harness_a_sentence_says_what_to_install(lm, monkeypatch):
    without_models(monkeypatch)
    for name in ("evaluation.lm", "mlx_lm.evaluate"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("evaluation.lm")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, _, err = lm("--tasks", "facts")
    assert code == 2 and "pip install -e '.[dev]'" in err
