"""`eval lm` as it is called: tables, files, going on, and mistakes of one line before a model is loaded."""

import json
import sys
from functools import partial

import pytest

pytest.importorskip("lm_eval", reason="needs pip install 'mlx-snapkv[lm]'")

from lm_eval.tasks import TaskManager
from lm_tasks import write_tasks

from mlx_snapkv.cli import eval_lm
from mlx_snapkv.evals import lm as harness

POLICY = "streaming_llm:budget=25%"


@pytest.fixture(scope="module")
def folder(demo_llama, tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("tasks"), demo_llama[1])


@pytest.fixture
def call(call, folder, monkeypatch):
    """Without an index of lm-evaluation-harness' own tasks, which takes seconds."""
    monkeypatch.setattr(harness, "TaskManager", partial(TaskManager, include_defaults=False))
    return partial(call, "eval", "lm", "--include-path", str(folder))


def test_the_table_has_the_full_cache_beside_each_policy(call):
    asked = "--tasks", "facts,choices", "--limit", "3", "--policy", POLICY
    code, out, err = call(*asked)
    assert code == 0 and "documents 12/12" in err
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "full cache 6 100.0 all" in lines and "method facts, exact_match choices, acc" in lines
    assert "full cache 100.0 100.0" in lines
    assert sum(line.startswith(POLICY) for line in lines) == 2


def test_files_are_written_and_the_same_command_goes_on(call, tmp_path, monkeypatch):
    base = tmp_path / "folder" / "r"
    base.parent.mkdir()
    args = ["--tasks", "facts", "--limit", "2", "--output", str(base)]
    code, first, _ = call(*args)
    assert code == 0 and {p.name for p in base.parent.iterdir()} == {"r.jsonl", "r.json", "r.md"}
    stored = (base.parent / "r.jsonl").read_bytes()
    assert call(*args)[:2] == (0, first.replace("wrote", "replaced"))
    assert (base.parent / "r.jsonl").read_bytes() == stored
    code, out, _ = call(*args, "--policy", POLICY)
    assert code == 0 and (base.parent / "r.jsonl").read_bytes().startswith(stored)
    result = json.loads((base.parent / "r.json").read_text())
    assert [row["method"] for row in result["summary"]] == ["full cache", POLICY] and POLICY in out
    assert [len(record["documents"]) for record in result["records"]] == [2, 2]
    assert "| full cache | 2 | 100.0 |" in (base.parent / "r.md").read_text()
    without_models(monkeypatch)
    code, _, err = call(*args, "--seed", "3")
    assert code == 2 and "r.jsonl is of another run, with seed 123 and not 3" in err


@pytest.mark.parametrize(
    "args, message",
    (
        (["--tasks", "nothing_such"], "lm-evaluation-harness has no such task"),
        (["--tasks", "rolling"], "--tasks rolling judges whole texts"),
        (["--tasks", "facts", "--include-path", "nowhere"], "--include-path nowhere is no folder"),
        (["--tasks", "facts", "--policy", "nothing"], "nothing"),
        (["--tasks", "facts", "--output", "/dev/null/r"], "--output /dev/null/r"),
        (["--tasks", ","], "--tasks is empty"),
    ),
)
def test_mistakes_are_one_line_before_the_model_is_loaded(call, monkeypatch, args, message):
    without_models(monkeypatch)
    code, out, err = call(*args)
    assert (code, out) == (2, "") and message in err.splitlines()[-1]


def test_without_the_harness_a_sentence_says_what_to_install(call, monkeypatch):
    without_models(monkeypatch)
    for name in ("mlx_snapkv.evals.lm", "mlx_lm.evaluate"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("mlx_snapkv.evals.lm")
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    code, _, err = call("--tasks", "facts")
    assert code == 2 and "pip install 'mlx-snapkv[lm]'" in err


def without_models(monkeypatch):
    def load(*args):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(eval_lm, "load_model", load)
