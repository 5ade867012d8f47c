import json
import re

import pytest

SMALL = ["--length", "512", "--depths", "2"]
KEYDIFF, RANDOM = "keydiff:budget=25%,block=128", "random:budget=4%"


def test_a_table_files_and_the_next_run_that_reads_them(call, refused, tmp_path):
    base = tmp_path / "r.1"
    args = ["needle", *SMALL, "--policy", KEYDIFF, "--output", str(base)]
    code, first, err = call(*args, "--policy", RANDOM)
    starts = " full", " key", " ran"
    rows = [line.split() for line in first.splitlines() if line.startswith(starts)]
    assert code == 0 and [row[0] for row in rows] == ["full", KEYDIFF, RANDOM]
    assert rows[0][2:4] == ["2", "100.0"] and rows[2][1] == "2" and rows[2][2] != "100.0"
    assert "Question known, 512 tokens" in first and "later" not in first
    assert re.fullmatch(r"documents 2/2, \d+ s", err.strip())
    methods = ("full-cache", "keydiff-budget=25pct-block=128", "random-budget=4pct")
    pictures = [f"-{name}-known.png" for name in methods]
    names = {f"r.1{ending}" for ending in (".jsonl", ".json", ".md", *pictures)}
    assert {path.name for path in base.parent.iterdir()} == names
    stored = (base.parent / "r.1.jsonl").read_bytes()
    code, second, err = call(*args, "--policy", RANDOM)
    assert (code, second, err) == (0, first.replace("wrote", "replaced"), "")
    assert (base.parent / "r.1.jsonl").read_bytes() == stored
    own = tmp_path / "own.txt"
    own.write_text("Nothing much happened that day.")
    assert "belongs to another run, with haystack" in refused(*args, "--haystack", str(own))
    page = (base.parent / "r.1.md").read_text()
    assert "# Retrieval" in page and "| full cache | 2 | 100.0 |" in page
    assert "](<r.1-full-cache-known.png>)" in page


def test_lines_compare_pooling_by_default(call):
    code, out, _ = call(*"lines --length 512 --depths 1 --json --seed 3".split())
    result = json.loads(out)
    assert code == 0 and (result["wording"], result["seed"]) == ("facts", 3)
    widths = [s["method"].partition("pool_kernel=")[2].split(",")[0] for s in result["summary"]]
    assert widths == ["", "1", "7", "21", ""]
    assert all(s["reason"] is None for s in result["summary"][1:])


def test_the_suite_has_both_settings_and_goes_on(call, tmp_path):
    policy = "snapkv:budget=64,n_sink=4,n_window=16,obs_window=16,lookahead=0"
    small = "suite --length 512 --documents 1 --questions 1 --task single".split()
    base = tmp_path / "suite"
    code, out, _ = call(*small, "--policy", policy, "--output", str(base))
    assert code == 0 and "by task" not in out and "by mask" not in out
    assert all(f"Question {setting}, 512 tokens" in out for setting in ("known", "later"))
    recalled = ["--memory", "recall", "--by-mask", "fastgen:recovery=0.9"]
    code, out, _ = call(*small, "--policy", policy, *recalled, "--output", str(base), "--json")
    methods = [s["method"] for s in json.loads(out)["summary"]]
    assert code == 0 and methods[-1] == "fastgen:recovery=0.9, by mask"
    recalling = ["memory recall" in method for method in methods]
    assert recalling == [False, False, True, True, False, False]
    page = base.with_suffix(".md").read_text()
    assert "By mask: all entries are held" in page and "| by mask |" in page
    lines = base.with_suffix(".jsonl").read_text().splitlines()
    assert len(lines) == 1 + 2 + 2 + 2 + 2  # the setting, the full cache once, and three ways


@pytest.mark.parametrize(
    "task", ["needle --depths 1", "lines --depths 1", "suite --task single --documents 1"]
)
def test_sparse_attention_is_measured(call, task):
    name = "sparse:budget=12.5%,read_top_k=128"
    how = ["--length", "512", "--questions", "2", "--sparse", name.partition(":")[2], "--json"]
    code, out, _ = call(*task.split(), *how)
    methods = {s["method"]: s for s in json.loads(out)["summary"]}
    assert code == 0 and [*methods] == ["full cache", name]
    assert methods[name]["entries"] < 80
