"""The output of `make bench-gpu`, run on this machine with a built-in model and short prompts."""

import re
import sys
from pathlib import Path

import bench_gpu
import pytest
import yaml

TEMPLATES = Path(__file__).parents[2] / ".github" / "ISSUE_TEMPLATE"


def test_the_output_has_the_machine_and_a_row_for_each_length_and_cache(monkeypatch, capsys):
    given = "bench_gpu.py --model demo --lengths 400 800 --tokens 8".split()
    monkeypatch.setattr(sys, "argv", given)
    bench_gpu.main()
    out, err = capsys.readouterr()
    title, about, results = out.strip().split("\n\n")
    assert (
        title == "### demo" and "\n| wired limit | " in about and "\n| attention of demo |" in about
    )
    head, _, *rows = (
        [cell.strip() for cell in line.split("|")[1:-1]] for line in results.splitlines()
    )
    assert head == bench_gpu.COLUMNS and len(rows) == 6
    assert [row[1] for row in rows] == [*bench_gpu.METHODS] * 2
    for full, snapkv, sparse in (rows[:3], rows[3:]):
        assert full[0] == snapkv[0] == sparse[0]
        assert full[4].endswith("(1.00x)") and (full[-1], sparse[-1]) == (
            "right",
            "right, the same",
        )
        assert re.fullmatch(r"(right|wrong), (the same|differs)", snapkv[-1])
        assert snapkv[6].endswith("kB") and full[6].endswith("MB")
    assert err.count("tokens, ") == 6


def test_a_prompt_that_does_not_fit_is_skipped(demo_llama, monkeypatch, capsys):
    machine = bench_gpu.this_machine()._replace(usable=1000)
    monkeypatch.setattr(bench_gpu, "this_machine", lambda: machine)
    assert list(bench_gpu.rows(*demo_llama, 400, 8)) == []
    assert re.search(r"400 tokens would take .* of 1 kB", capsys.readouterr().err)


def test_a_missing_model_is_one_sentence(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_gpu.py", "--model", "nowhere"])
    with pytest.raises(SystemExit, match="2"):
        bench_gpu.main()
    assert capsys.readouterr().err.startswith("bench-gpu: --model nowhere: no such folder")


def test_issue_templates_ask_for_the_output_of_these_commands():
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in TEMPLATES.glob("*.yml")}
    assert {"bug", "measurement"} <= forms.keys()
    for form in forms.values():
        assert {"name", "description", "body"} <= form.keys()
        ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert len(set(ids)) == len(ids) > 1
        required = [p for p in form["body"] if p.get("validations", {}).get("required")]
        assert required and all(part["attributes"]["label"] for part in required)
    assert "make bench-gpu" in str(forms["measurement"]) and "mlx-snapkv doctor" in str(
        forms["bug"]
    )
