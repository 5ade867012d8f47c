"""The page of all policies: what it measures, and that it is its result."""

import functools
import json
from pathlib import Path

import pytest

from mlx_snapkv.evals.answering import FULL, KNOWN, LATER
from mlx_snapkv.policies import POLICIES
from scripts import measure_quality, quality_page, quality_parts, quality_plot, quality_ways

DOCS = Path(__file__).parents[2] / "docs"
N_SHORTEST, N_LAYERS = 1900, 4  # tokens of the shortest prompts


def ways(part):
    listed = quality_parts.PARTS[part].lines
    return [(share, line.method(share)) for share, line in measure_quality.by_share(listed)]


def test_every_policy_is_measured():
    asked = {way.scores.stages[0].name for part in (KNOWN, LATER) for _, way in ways(part)}
    assert asked == set(POLICIES)


@pytest.mark.parametrize("part", quality_parts.PARTS)
def test_every_way_has_its_budget_and_room(part):
    for share, way in ways(part):
        if share == 1:  # FastGen's heads choose
            continue
        policy = way.scores
        prefill_policy, decode_policy = policy.stages
        prefill_policy.prefill_quotas(N_SHORTEST, N_LAYERS)
        quotas = decode_policy.quotas(2048, N_LAYERS)
        assert {quota.entries for quota in quotas} == {2048 // share}
    names = [way.name for _, way in ways(part)]
    assert len(set(names)) == len(names)


def test_needles_are_six_digits(demo_llama):
    _, tokenizer = demo_llama
    (place, document), *others = quality_parts.SixDigits(tokenizer, ["six digits"], [768], 2, 3)
    assert len(others) == 1 and len(document.questions) == 3
    assert place == {"task": "six digits", "length": 768, "document": 0}
    for question in document.questions:
        assert 600 < len(question.prompt) <= 768
        assert (
            question.prompt[: document.n_shared]
            == document.questions[0].prompt[: document.n_shared]
        )
        assert question.expected.isdigit() and len(question.expected) == 6
        assert question.score(f" {question.expected}\n") == 1
        assert question.score(question.expected + "0") == 0


def test_only_what_is_asked_in_full_is_shown(demo_tasks, tmp_path, monkeypatch):
    """The full cache and one way are complete, of another there is one answer; no time is left."""
    model, tokenizer = demo_tasks
    monkeypatch.setattr(measure_quality, "load_model", lambda name: (model, tokenizer))
    whole, broken = quality_ways.lines(LATER)[0], quality_ways.lines(LATER)[1]
    asked = functools.partial(
        quality_parts.Part,
        "demo-tasks",
        LATER,
        tasks=("single",),
        length=640,
        documents=1,
        questions=2,
    )
    monkeypatch.setitem(measure_quality.PARTS, "later", asked([whole]))
    rows = list(measure_quality.measure("later", tmp_path, float("inf")))
    assert [row["line"] for row in rows] == [FULL] + ["keydiff"] * 3
    file = tmp_path / "demo-tasks-later.jsonl"
    lines = file.read_text().splitlines()
    one = json.loads(lines[-1]) | {"method": broken.method(4).name}
    file.write_text("\n".join([*lines, json.dumps(one)]) + "\n")
    monkeypatch.setitem(measure_quality.PARTS, "later", asked([whole, broken]))
    again = list(measure_quality.measure("later", tmp_path, 0))
    assert again == rows
    assert all(row["asked"] == 2 for row in again)


def row(line, share, score, **other):
    difference = {"mean": score - 1, "low": score - 1, "high": score - 1, "better": 0, "worse": 1}
    return {
        "line": line,
        "base": "tova",
        "share": share,
        "asked": 100,
        "score": score,
        "difference": difference,
        "entries": 2048 // share,
        "kv_bytes": 1000,
        "file_bytes": 0,
        "by_task": {"single": score, "several": 0.0},
    } | other


def test_a_table_has_a_row_a_way_and_one_for_each_budget():
    rows = [
        row(FULL, 1, 1.0, entries=None),
        row("tova", 8, 0.25),
        row("book", 16, 0.75, file_bytes=2000, to_base={**row("", 16, 1.5)["difference"]}),
    ]
    first, second = quality_page._by_share(rows, "w")
    assert first.splitlines()[1:] == [
        "### 1/8 of the entries, w",
        "",
        "| way | n | right | against the full cache | against tova | entries | KV memory | single | several |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| full cache | 100 | 1.00 |  |  | all | 1 kB | 1.00 | 0.00 |",
        "| tova | 100 | 0.25 | -0.75 (-0.75 to -0.75) |  | 256 | 1 kB | 0.25 | 0.00 |",
    ]
    told = "| book | 100 | 0.75 | -0.25 (-0.25 to -0.25) | +0.50 (+0.50 to +0.50) | 128 | 1 kB, 2 kB on disk |"
    assert told in second


def test_the_picture_has_a_curve_for_each_way_of_several_budgets(tmp_path):
    from matplotlib.figure import Figure

    rows = [row(FULL, 1, 1.0, part=KNOWN), row("snapkv", 8, 0.9, part=KNOWN)]
    rows += [row("snapkv", 16, 0.5, part=KNOWN), row("tova", 8, 0.1, part=KNOWN)]
    axes = Figure().add_subplot()
    quality_plot.panel(axes, KNOWN, rows, {"snapkv": ("red", "o")})
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert drawn == {FULL: [1, 1], "snapkv": [0.9, 0.5], "the other policies": [0.1]}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1/8", "1/16"]
    rows += [r | {"part": LATER} for r in rows]
    quality_plot.write_plot({"rows": rows, "length": 2048}, tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 5000


def test_a_hundred_questions_a_cell():
    result = json.loads((DOCS / "quality.json").read_text(encoding="utf-8"))
    assert min(row["asked"] for row in result["rows"]) >= 100
