"""The real command: tables, files, going on, and mistakes of one line."""

import json
import re
import subprocess
import sys
from functools import partial

import fork_helpers
import pytest
from interrupt_helpers import interrupt, wait_for

SMALL = ["--length", "512", "--depths", "2"]
KEYDIFF = "keydiff:budget=25%,block=128"


@pytest.fixture
def call(call):
    return partial(call, "eval")


def test_the_table_has_a_row_a_policy(call):
    code, out, err = call("needle", *SMALL, "--policy", KEYDIFF, "--policy", "random:budget=4%")
    assert code == 0
    lines = [
        line.split() for line in out.splitlines() if line.startswith((" full", " key", " ran"))
    ]
    assert [line[0] for line in lines] == ["full", KEYDIFF, "random:budget=4%"]
    assert lines[0][2:4] == ["2", "100.0"] and lines[2][1] == "2" and lines[2][2] != "100.0"
    assert "Question known, 512 tokens" in out and "later" not in out
    assert re.fullmatch(r"documents 2/2, \d+ s", err.strip())


def test_files_are_written_and_the_next_run_reads_them(call, tmp_path):
    base = tmp_path / "folder" / "r.1"
    base.parent.mkdir()
    args = ["needle", *SMALL, "--policy", KEYDIFF, "--output", str(base)]
    code, first, _ = call(*args)
    pictures = "-full-cache-known.png", "-keydiff-budget=25pct-block=128-known.png"
    names = {f"r.1{ending}" for ending in (".jsonl", ".json", ".md", *pictures)}
    assert code == 0 and {p.name for p in base.parent.iterdir()} == names
    stored = (base.parent / "r.1.jsonl").read_bytes()
    code, second, err = call(*args)
    assert (code, second, err) == (0, first.replace("wrote", "replaced"), "")
    assert (base.parent / "r.1.jsonl").read_bytes() == stored
    result = json.loads((base.parent / "r.1.json").read_text())
    assert len(result["records"]) == 4 and len(result["summary"]) == 2
    own = tmp_path / "own.txt"
    own.write_text("Nothing much happened that day.")
    code, out, err = call(*args, "--haystack", str(own))
    assert (code, out) == (2, "") and "of another run, with haystack" in err
    page = (base.parent / "r.1.md").read_text()
    assert "# Retrieval" in page and "| full cache | 2 | 100.0 |" in page
    assert "](<r.1-full-cache-known.png>)" in page


def test_lines_compare_pooling_by_default(call):
    code, out, _ = call("lines", "--length", "512", "--depths", "1", "--json", "--seed", "3")
    result = json.loads(out)
    assert code == 0 and (result["wording"], result["seed"]) == ("facts", 3)
    widths = [s["method"].partition("pool_kernel=")[2].split(",")[0] for s in result["summary"]]
    assert widths == ["", "1", "7", "21", ""]
    assert all(s["reason"] is None for s in result["summary"][1:])


def test_an_interrupt_says_how_to_go_on(tmp_path):
    base = tmp_path / "r"
    options = [*SMALL, "--questions", "999", "--output", str(base)]
    command = [sys.executable, "-m", "mlx_snapkv", "eval", "needle", *options]
    process = fork_helpers.Popen(command, stderr=subprocess.PIPE, text=True)
    file = base.with_name("r.jsonl")
    wait_for(process, file, 3)
    interrupt(process, file)
    assert all(json.loads(line) for line in file.read_text().splitlines())


def test_the_suite_has_both_settings_and_goes_on(call, tmp_path):
    policy = "snapkv:budget=64,n_sink=4,n_window=16,obs_window=16,lookahead=0"
    small = ["--length", "512", "--documents", "1", "--questions", "1", "--task", "single"]
    base = tmp_path / "suite"
    code, out, _ = call("suite", *small, "--policy", policy, "--output", str(base))
    assert code == 0 and "Question known, 512 tokens" in out
    assert "Question later, 512 tokens" in out and "by task" not in out
    assert {p.name for p in tmp_path.iterdir()} == {f"suite{e}" for e in (".jsonl", ".json", ".md")}
    recalled = ["--memory", "recall", "--refresh", "turn"]
    args = ["--policy", policy, *recalled, "--output", str(base), "--json"]
    code, out, _ = call("suite", *small, *args)
    methods = [s["method"] for s in json.loads(out)["summary"]]
    assert code == 0
    assert ["memory recall, refresh turn" in name for name in methods] == [False] * 2 + [True] * 2
    lines = base.with_suffix(".jsonl").read_text().splitlines()
    assert len(lines) == 1 + 2 + 2 + 2  # the setting, the full cache once, and both ways


def test_head_wise_budgets_are_measured_by_mask(call):
    """Beside the policy itself; the table says so, and claims no memory for it."""
    policy = "snapkv:budget=6%,n_sink=4,n_window=16,obs_window=16"
    args = "suite --task single --setting known --length 600 --documents 1 --questions 1".split()
    code, out, _ = call(*args, "--policy", policy, "--by-mask", "fastgen:recovery=0.9")
    rows = [line for line in out.splitlines() if line.strip().startswith("fastgen")]
    assert code == 0 and "fastgen:recovery=0.9, by mask" in rows[0]
    assert rows[0].rstrip().endswith("by mask") and "By mask: all entries are held" in out
