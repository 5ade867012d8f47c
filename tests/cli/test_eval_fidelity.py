"""The real command: tables, files, going on, and mistakes of one line."""

import json
import random
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import fork_helpers
import pytest
from interrupt_helpers import interrupt, wait_for

from mlx_snapkv.demo.questions import make_haystack

SNAPKV = "snapkv:budget=25%,n_sink=4,n_window=16,obs_window=8,lookahead=4"
STREAMING = "streaming_llm:budget=25%,schedule=once"
SMALL = ["--length", "150", "--continuation", "16"]
POLICIES = ["--policy", SNAPKV, "--policy", STREAMING]


@pytest.fixture
def call(call):
    return partial(call, "eval", "fidelity")


@pytest.fixture(scope="module")
def texts(demo_llama, tmp_path_factory):
    """A folder of two texts of two pieces each, one that is too short, and a picture."""
    folder = tmp_path_factory.mktemp("texts")
    for name in "ab":
        text, _ = make_haystack(demo_llama[1], random.Random(name), 3, 380)
        (folder / f"{name}.txt").write_text(text)
    (folder / "short.txt").write_text("It was cold.")
    (folder / "picture.png").write_bytes(b"\x89PNG\xff\0")
    return str(folder)


def test_a_table_has_a_row_a_policy(call, texts):
    code, out, err = call("--text", texts, *SMALL, *POLICIES)
    assert code == 0 and "The text goes on" in out and "4 pieces of 2 texts, 64 tokens." in out
    assert "question" not in out
    full = next(line.split() for line in out.splitlines() if "100.0%" in line)
    assert "0" in full and "151" in full
    assert len(re.findall(r"0\.\d{3} \(0\.\d{3} to 0\.\d{3}\)", out)) == 2
    assert "Files left out: 1 not UTF-8 text, 1 shorter than a piece." in err
    assert re.search(r"documents 4/4, \d+ s", err)


def test_files_are_made_in_a_new_folder_and_more_pieces_go_on(call, texts, tmp_path):
    base = tmp_path / "new" / "folder" / "r"
    settings = [word for s in ("text", "known", "later") for word in ("--setting", s)]
    args = ["--text", texts, *SMALL, *POLICIES, *settings, "--output", str(base)]
    code, _, _ = call(*args, "--documents", "1")
    assert code == 0 and {p.name for p in base.parent.iterdir()} == {"r.jsonl", "r.json", "r.md"}
    before = (base.parent / "r.jsonl").read_bytes()
    code, out, _ = call(*args, "--documents", "2", "--policy", "random:budget=25%,schedule=once")
    after = (base.parent / "r.jsonl").read_bytes()
    assert code == 0 and after.startswith(before) and "replaced" in out
    result = json.loads((base.parent / "r.json").read_text())
    assert len(result["records"]) == 2 * 3 * 4 == len(after.splitlines()) - 1
    assert {r["question"] for r in result["records"] if r["setting"] != "text"} == set(
        result["questions"][:2]
    )
    page = (base.parent / "r.md").read_text()
    assert page.startswith("# Fidelity to the full cache") and page.count("\n## ") == 3


def test_json_is_one_object(call, texts):
    code, out, _ = call("--text", texts, *SMALL, *POLICIES, "--json", "--documents", "1")
    result = json.loads(out)
    assert code == 0 and (result["task"], result["length"]) == ("fidelity", 150)
    assert result["summary"][0]["method"] == "full cache"
    full, snapkv, _ = result["records"]
    assert full["kl"] == 0 < snapkv["kl"] and full["kv_bytes"] > 3 * snapkv["kv_bytes"]


def test_own_questions_are_asked_in_turn(call, texts):
    mine = ["--question", "Who?", "--question", "Where?"]
    args = ["--text", texts, *SMALL, "--policy", SNAPKV, "--setting", "later", *mine, "--json"]
    code, out, _ = call(*args, "--documents", "3")
    records = json.loads(out)["records"]
    assert code == 0 and [r["question"] for r in records[::2]] == ["Who?", "Where?", "Who?"]


def test_an_interrupt_says_how_to_go_on(texts, tmp_path):
    base, many = tmp_path / "r", tmp_path / "many.txt"
    many.write_text("\n".join([Path(texts, "a.txt").read_text()] * 50))
    options = ["--text", str(many), *SMALL, *POLICIES, "--documents", "999", "--output", str(base)]
    command = [sys.executable, "-m", "mlx_snapkv", "eval", "fidelity", *options]
    process = fork_helpers.Popen(command, stderr=subprocess.PIPE, text=True)
    file = base.with_name("r.jsonl")
    wait_for(process, file, 3)
    interrupt(process, file)
    assert all(json.loads(line) for line in file.read_text().splitlines())


NOWHERE = ["--model", "/nowhere"]  # mistakes that are told before a model is looked for


@pytest.mark.parametrize(
    "args, words",
    [
        (["--policy", SNAPKV], "--text"),
        (["--text", "{}"], "--policy"),
        (["--text", "/nowhere", *POLICIES, *NOWHERE], "--text /nowhere: No such file"),
        (["--text", "/dev/null", *POLICIES, *NOWHERE], "there is no UTF-8 text"),
        (["--text", "{}/picture.png", *POLICIES, *NOWHERE], "is not UTF-8 text: convert it"),
        (["--text", "{}/short.txt", *POLICIES, *NOWHERE], "no text has the 1,465 tokens"),
        (["--text", "{}", "--policy", "snapkv", *NOWHERE], "snapkv would compress nothing here"),
        (
            ["--text", "{}", *POLICIES, "--setting", "both", *NOWHERE],
            "--setting must be text, known or later, got 'both'",
        ),
        (["--text", "{}", *POLICIES, *SMALL, "--output", "/dev/null/x", *NOWHERE], "--output"),
        (["--text", "{}", *POLICIES, *SMALL, *NOWHERE], "--model /nowhere: no such folder"),
        (["--text", "{}", *POLICIES, "--length", "1000"], "no text has the 1,065 tokens"),
        (["--text", "{}", *POLICIES, "--length", "0"], "--length"),
    ],
)
def test_a_mistake_is_one_line(call, texts, args, words):
    code, out, err = call(*(arg.replace("{}", texts) for arg in args))
    assert (code, out) == (2, "")
    assert words in err and len(err.strip().splitlines()) == 1


def test_a_file_of_other_texts_is_refused(call, texts, tmp_path):
    base = str(tmp_path / "r")
    args = [*SMALL, "--policy", SNAPKV, "--documents", "1", "--output", base]
    assert call("--text", texts, *args)[0] == 0
    code, out, err = call("--text", f"{texts}/a.txt", *args)
    assert (code, out) == (2, "") and "of another run, with text" in err
