import json
import random

import pytest

from mlx_snapkv.demo.questions import make_haystack

KEYDIFF, RANDOM = "keydiff:budget=25%,block=128", "random:budget=4%"


@pytest.fixture
def data(tmp_path, demo_llama):
    """Return a folder with RULER's layout in kvpress's data set: one length, three tasks of two questions, one file."""
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
    """Both settings are scored, and each task has its own column."""
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


def test_task_setting_and_documents_select_the_questions(call, data):
    args = "--task vt --setting known --documents 1 --json --ignore-chat-template".split()
    code, out, _ = call("data", "--data", data, *args)
    result = json.loads(out)
    assert code == 0 and result["chat_template"] is False
    assert [(r["task"], r["setting"]) for r in result["records"]] == [("vt", "known")] * 2
