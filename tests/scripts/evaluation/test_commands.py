import json
import re

import pytest

SMALL = ["--length", "512", "--depths", "2"]
KEYDIFF, RANDOM = "keydiff:budget=25%,block=128", "random:budget=4%"


def test_needle_prints_a_table_and_writes_files_that_the_next_run_reads(call, refused, tmp_path):
    base = tmp_path / "r.1"
    args = ["needle", *SMALL, "--policy", KEYDIFF, "--output", str(base)]
    code, first, err = call(*args, "--policy", RANDOM)
    starts = " full", " key", " ran"
    rows = [line.split() for line in first.splitlines() if line.startswith(starts)]
    assert code == 0 and [row[0] for row in rows] == ["full", KEYDIFF, RANDOM]
    assert rows[0][2:4] == ["2", "100.0"] and rows[2][1] == "2" and rows[2][2] != "100.0"
    assert "Question known, 512 tokens" in first and "later" not in first
    assert re.fullmatch(r"documents 2/2, \d+ s", err.strip())
    names = {f"r.1{ending}" for ending in (".jsonl", ".json", ".md")}
    assert {path.name for path in base.parent.iterdir()} == names
    stored = (base.parent / "r.1.jsonl").read_bytes()
    code, second, err = call(*args, "--policy", RANDOM)
    assert (code, second) == (0, first.replace("wrote", "replaced"))
    assert re.fullmatch(r"documents 2/2, \d+ s", err.strip())
    assert (base.parent / "r.1.jsonl").read_bytes() == stored
    own = tmp_path / "own.txt"
    own.write_text("Nothing much happened that day.")
    assert "belongs to another run, with haystack" in refused(*args, "--haystack", str(own))
    page = (base.parent / "r.1.md").read_text()
    assert "# Retrieval" in page and "| full cache | 2 | 100.0 |" in page


def test_the_suite_has_both_settings_and_continues_a_run(call, tmp_path):
    policy = "snapkv:budget=64,n_sink=4,n_window=16,obs_window=16,lookahead=0"
    small = "suite --length 512 --documents 1 --questions 1 --task single".split()
    base = tmp_path / "suite"
    code, out, _ = call(*small, "--policy", policy, "--output", str(base))
    assert code == 0 and "by task" not in out
    assert all(f"Question {setting}, 512 tokens" in out for setting in ("known", "later"))
    code, out, _ = call(*small, *("--policy", policy, "--policy", RANDOM), "--output", str(base))
    assert code == 0 and RANDOM in base.with_suffix(".md").read_text()
    lines = base.with_suffix(".jsonl").read_text().splitlines()
    assert len(lines) == 1 + 2 + 2 + 2  # the setting, the full cache once, and two policies


@pytest.mark.parametrize("task", ["needle --depths 1", "suite --task single --documents 1"])
def test_sparse_attention_is_measured(call, task):
    name = "sparse:budget=12.5%,read_top_k=128"
    how = ["--length", "512", "--questions", "2", "--sparse", name.partition(":")[2], "--json"]
    code, out, _ = call(*task.split(), *how)
    methods = {s["method"]: s for s in json.loads(out)["summary"]}
    assert code == 0 and [*methods] == ["full cache", name]
    assert methods[name]["entries"] < 80
