"""The real command: tables, files, going on, and mistakes of one line."""

import json
import random
import re
from functools import partial

import pytest

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
    assert "Files left out: 1 not UTF-8 text." in err
    assert re.search(r"documents 4/4, \d+ s", err)


def test_files_are_made_in_a_new_folder_and_more_pieces_go_on(call, texts, tmp_path):
    base = tmp_path / "new" / "folder" / "r"
    settings = [word for s in ("text", "known", "later") for word in ("--setting", s)]
    args = ["--text", texts, *SMALL, *POLICIES, *settings, "--output", str(base)]
    args += ["--question", "Who?", "--question", "Where?"]
    code, _, _ = call(*args, "--documents", "1")
    assert code == 0 and {p.name for p in base.parent.iterdir()} == {"r.jsonl", "r.json", "r.md"}
    before = (base.parent / "r.jsonl").read_bytes()
    code, out, _ = call(*args, "--documents", "2", "--policy", "random:budget=25%,schedule=once")
    after = (base.parent / "r.jsonl").read_bytes()
    assert code == 0 and after.startswith(before) and "replaced" in out
    result = json.loads((base.parent / "r.json").read_text())
    assert len(result["records"]) == 2 * 3 * 4 == len(after.splitlines()) - 1
    asked = [r["question"] for r in result["records"] if r["setting"] != "text"]
    assert list(dict.fromkeys(asked)) == ["Who?", "Where?"]  # of a piece each
    page = (base.parent / "r.md").read_text()
    assert page.startswith("# Fidelity to the full cache") and page.count("\n## ") == 3
    code, _, err = call(*args, "--documents", "1", "--text", f"{texts}/a.txt")
    assert code == 2 and "of another run, with text" in err
