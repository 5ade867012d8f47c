"""`eval ruler`, `longbench` and `scbench`, on small copies of the data in the formats of the originals."""

import json
import subprocess
import sys

import field_data
import fork_helpers
import pytest
from interrupt_helpers import interrupt, wait_for

from mlx_snapkv.evals.ruler import TASKS

KEYDIFF = "keydiff:budget=25%,block=128"
RANDOM = "random:budget=4%"


@pytest.fixture
def tokenizer(demo_llama):
    return demo_llama[1]


def result(call, *args):
    code, out, err = call("eval", *args, "--json")
    assert code == 0, err
    return json.loads(out)


def by_way(found, setting):
    return {s["way"]: s["score"] for s in found["summary"] if s["setting"] == setting}


def test_ruler(call, tmp_path, tokenizer):
    folder = field_data.ruler(tmp_path, tokenizer)
    found = result(call, "ruler", "--data", str(folder), "--chat-template", "--policy", RANDOM)
    for setting in ("known", "later"):
        assert by_way(found, setting)["full cache"] == 0.75
        assert by_way(found, setting)[RANDOM] == 0.0
    (full, *_) = found["summary"]
    assert full["by_task"] == {"niah_single_1": 1.0, "vt": 0.5} and full["length"] == 4096
    assert all(r["tokens"] > 300 for r in found["records"])


def test_prepared_prompts_are_given_as_they_are(call, tmp_path, tokenizer):
    """As with RULER's other template types, which put the model's template in the text."""
    row = field_data.prepared(tokenizer, 1)
    first, rest = row["outputs"][0].split(" ", 1)  # of a pass phrase
    row["input"] = f"<|bos|><|user|>{row['input']}<|assistant|>"
    row |= {"answer_prefix": f" {first}", "outputs": [rest]}
    field_data.write_lines(tmp_path / "niah_single_2.jsonl", [row])
    found = result(call, "ruler", "--data", str(tmp_path), "--setting", "known")
    (record,) = found["records"]
    assert (record["score"], record["length"]) == (1.0, None)
    assert record["answer"].strip() == rest
    whole = row["input"] + row["answer_prefix"]
    assert record["tokens"] == len(tokenizer.encode(whole, add_special_tokens=False))


def test_rulers_parquet_and_its_tables(call, tmp_path, tokenizer):
    folder = field_data.ruler_parquet(tmp_path, tokenizer)
    code, out, _ = call("eval", "ruler", "--data", str(folder), "--documents", "1")
    assert code == 0 and "Question later, 4,096 tokens" in out
    rows = [line.split() for line in out.splitlines()]
    assert ["niah_multikey_1", "100.0"] in rows and ["qa_1", "100.0"] in rows
    assert ["full", "cache", "2", "100.0", "all"] in [row[:5] for row in rows]


def test_longbench_goes_on_where_it_was(call, tmp_path, tokenizer):
    """Another task and another policy add to the file; what was answered is not asked again."""
    data = field_data.longbench(tmp_path / "data", tokenizer)
    base = tmp_path / "r"
    args = ["longbench", "--data", str(data), "--setting", "known", "--output", str(base)]
    first = result(call, *args, "--task", "hotpotqa")
    assert by_way(first, "known") == {"full cache": 1.0}
    stored = base.with_suffix(".jsonl").read_text().splitlines()
    assert len(stored) == 1 + 3
    found = result(call, *args, "--policy", KEYDIFF)
    (full, keydiff) = found["summary"]
    assert full["by_task"] == {"hotpotqa": 1.0, "triviaqa": 1.0, "passage_count": 0.0}
    assert full["averages"]["few-shot"] == 1.0 and full["averages"]["all"] == pytest.approx(2 / 3)
    assert keydiff["way"] == KEYDIFF and keydiff["asked"] == 5
    lines = base.with_suffix(".jsonl").read_text().splitlines()
    assert lines[:4] == stored and len(lines) == 1 + 2 * 5
    page = base.with_suffix(".md").read_text()
    assert "# LongBench" in page and "| few-shot | 100.0 |" in page
    assert base.with_suffix(".png").stat().st_size > 5000


def test_longbenchs_prompts(call, tmp_path, tokenizer):
    """Those of the configuration, cut in their middle if they are too long; E's tasks by length."""
    data = field_data.longbench(tmp_path, tokenizer)
    args = ["longbench", "--data", str(data), "--setting", "later", "--length", "512"]
    found = result(call, *args, "--task", "hotpotqa", "--task", "hotpotqa_e")
    tokens = [r["tokens"] for r in found["records"] if r["task"] == "hotpotqa"]
    assert tokens[0] < 470 and 470 <= tokens[2] <= 512 - 24
    assert found["summary"][0]["averages"]["0-4k"] == 1.0


def test_longbench_v2(call, tmp_path, tokenizer):
    data = field_data.longbench2(tmp_path, tokenizer)
    found = result(call, "longbench", "--data", str(data), "--setting", "known")
    assert found["task"] == "longbench-v2" and len(found["records"]) == 2
    assert set(found["summary"][0]["averages"]) == {"overall", "easy", "hard", "short", "long"}
    assert all(r["tokens"] > 400 and r["expected"] == "B" for r in found["records"])


@pytest.mark.parametrize("mode", ["multi-request", "multi-turn"])
def test_scbench(call, tmp_path, tokenizer, mode):
    data = field_data.scbench(tmp_path / "d", tokenizer)
    args = ["scbench", "--data", str(data), "--mode", mode, "--policy", RANDOM, "--policy", KEYDIFF]
    found = result(call, *args)
    scores = by_way(found, "later")
    assert scores["full cache"] == 1.0 and scores[RANDOM] < 0.5 < scores[KEYDIFF]
    tokens = [r["tokens"] for r in found["records"]][:3]
    grows = tokens == sorted(tokens) and tokens[2] - tokens[0] > 20
    assert grows == (mode == "multi-turn")


def test_memory_and_verification(call, tmp_path, tokenizer):
    data = field_data.scbench(tmp_path / "d", tokenizer)
    args = ["scbench", "--data", str(data), "--task", "scbench_kv", "--memory", "recall"]
    found = result(call, *args, "--verify", "unsure", "--policy", KEYDIFF)
    name = f"{KEYDIFF}, memory recall, verify unsure"
    assert by_way(found, "later")[name] == 1.0


def test_a_byte_order_mark_is_none_of_the_data(call, tmp_path, tokenizer):
    for path in field_data.ruler(tmp_path, tokenizer).rglob("*.jsonl"):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    found = result(call, "ruler", "--data", str(tmp_path), "--chat-template")
    assert by_way(found, "known")["full cache"] == 0.75


def test_an_interrupt_says_how_to_go_on(tmp_path, tokenizer):
    rows = [field_data.prepared(tokenizer, seed) for seed in range(200)]
    field_data.write_lines(tmp_path / "vt.jsonl", rows)
    base = tmp_path / "r"
    args = ["ruler", "--data", str(tmp_path), "--chat-template", "--output", str(base)]
    command = [sys.executable, "-m", "mlx_snapkv", "eval", *args]
    process = fork_helpers.Popen(command, stderr=subprocess.PIPE, text=True)
    file = base.with_name("r.jsonl")
    wait_for(process, file, 3)
    interrupt(process, file)


@pytest.mark.parametrize(
    "make, change, args, words",
    [
        ("ruler", "", ["--task", "niah"], "--task must be one of niah_single_1, niah_single_2"),
        ("ruler", "", ["--task", "cwe"], "--task cwe: the folder of --data has no file of it"),
        ("ruler", "", ["--setting", "sooner"], "--setting must be known, later or both"),
        ("ruler", "4096/vt/validation.jsonl damaged", [], "line 2 is damaged: get the file again"),
        ("ruler", "4096/vt/validation.jsonl no outputs", [], "row 1 has no 'outputs'"),
        (
            "ruler",
            "4096/vt/validation.jsonl long",
            [],
            "that the model was trained to: give --data",
        ),
        ("ruler", "4096/vt/validation.jsonl nested", [], "line 1 is damaged: get the file again"),
        ("ruler", "4096/vt/validation.jsonl half", [], "line 1 is damaged: get the file again"),
        ("ruler", "4096/vt/validation.jsonl empty", [], "'input' must be a text that is not empty"),
        ("ruler", "4096/vt/validation.jsonl rowless", [], "vt/validation.jsonl has no rows"),
        ("ruler_parquet", "4096/test-00000-of-00001.parquet damaged", [], "it is no parquet file"),
        ("ruler_parquet", "4096/test-00000-of-00001.parquet mute", [], "a whole number above 0"),
        ("ruler", "4096/copy/vt.jsonl new", [], "are vt of one length: give the folder of one"),
        ("ruler", "4096/vt/validation.jsonl flat", [], "its prompts are one line each"),
        (
            "longbench",
            "config/dataset2prompt.json gone",
            [],
            "copy LongBench's folder config to it",
        ),
        ("longbench", "config/dataset2maxlen.json damaged", [], "it is no JSON, so get it again"),
        ("longbench", "", ["--task", "qasper"], "--task qasper: the folder of --data has no file"),
        ("scbench", "", ["--length", "256"], "256 tokens leave no room for a prompt"),
        ("longbench2", "prompts/0shot.txt gone", [], "copy the folder prompts"),
        ("longbench2", "data.json damaged", [], "data.json is damaged: it is no JSON"),
        ("scbench", "eval_utils.py gone", [], "eval_utils.py, which has the prompts, is not there"),
        ("scbench", "eval_utils.py damaged", [], "is not SCBench's eval_utils.py"),
        ("scbench", "data/scbench_kv.jsonl no multi_turns", [], "row 1 has no 'multi_turns' as"),
        ("scbench", "", ["--task", "scbench_repoqa"], "--task scbench_repoqa can't be scored here"),
        ("scbench", "", ["--mode", "turns"], "--mode must be multi-request or multi-turn"),
    ],
)
def test_a_mistake_is_one_line(call, tmp_path, tokenizer, make, change, args, words):
    folder = getattr(field_data, make)(tmp_path / "d", tokenizer)
    if change:
        name, _, what = change.partition(" ")
        _spoil(folder / name, what)
    command = make.removesuffix("_parquet").removesuffix("2")
    code, out, err = call("eval", command, "--data", str(folder), *args)
    assert (code, out) == (2, "")
    assert words in err and len(err.strip().splitlines()) == 1


def _spoil(path, what):
    if what == "gone":
        path.unlink()
    elif what == "new":
        field_data.write_lines(path, [{"input": "a", "outputs": ["b"]}])
    elif what == "nested":
        path.write_text("[" * 100_000)
    elif what == "rowless":
        path.write_text("")
    elif what == "mute":
        columns = ("context", "question", "answer_prefix")
        row = {**dict.fromkeys(columns, "a"), "answer": ["b"], "task": "vt", "max_new_tokens": 0}
        field_data.write_parquet(path, [row])
    elif what == "damaged":
        path.write_bytes(path.read_bytes() + b"{1")
        if path.suffix == ".parquet":
            path.write_bytes(b"no table")
    else:
        row = json.loads(path.read_text())
        if what == "flat":
            row["input"] = " ".join(row["input"].split())
        elif what == "half":
            row["input"] += "\ud83e"
        elif what == "empty":
            row["input"] = ""
        elif what == "long":
            row["input"] = row["input"] * 50
        else:
            del row[what.removeprefix("no ")]
        field_data.write_lines(path, [row])


def test_everything_that_ruler_writes_is_read_and_scored(call, tmp_path, tokenizer):
    """Its own folders, answers beside the data, all 13 tasks with what each script writes; the mean over the tasks.

    Every answer is the first reference only: all of one, half of two, and for qa one of several is enough.
    """
    names = ("index", "length", "length_w_model_temp")
    wanted = {}
    for seed, task in enumerate(TASKS):
        row = field_data.prepared(tokenizer, seed, wrong=task in ("niah_multivalue", "cwe", "qa_2"))
        kept = {"input", "outputs", "answer_prefix", *names}
        kept |= {"token_position_answer"} if task.startswith("niah") else set()
        row = {name: value for name, value in row.items() if name in kept}
        folder = tmp_path / "model" / "synthetic" / "4096"
        field_data.write_lines(folder / "data" / task / "validation.jsonl", [row])
        answered = {name: row[name] for name in ("index", "input", "outputs")} | {"pred": "x"}
        field_data.write_lines(folder / "pred" / f"{task}.jsonl", [answered])
        wanted[task] = 0.5 if task in ("niah_multivalue", "cwe") else 1.0
    args = ["ruler", "--data", str(tmp_path / "model"), "--chat-template", "--setting", "known"]
    found = result(call, *args)
    (full,) = found["summary"]
    assert full["by_task"] == wanted and list(full["by_task"]) == list(TASKS)
    assert full["length"] == 4096 and full["score"] == pytest.approx(12 / 13)


def test_several_lengths_stand_side_by_side(call, tmp_path, tokenizer):
    """RULER's own folders; the mean over lengths is that of the means over tasks."""
    for length, wrong in ((1024, False), (512, True)):
        row = field_data.prepared(tokenizer, 2, wrong)
        field_data.write_lines(tmp_path / str(length) / "data" / "vt" / "validation.jsonl", [row])
    args = ["ruler", "--data", str(tmp_path), "--chat-template", "--setting", "known"]
    code, out, _ = call("eval", *args)
    rows = [line.split() for line in out.splitlines()]
    assert code == 0 and ["full", "cache", "50.0", "100.0", "75.0"] in rows


@pytest.mark.parametrize("command", ["ruler", "longbench", "scbench"])
def test_a_folder_that_is_not_there_or_is_empty(call, tmp_path, command):
    code, out, err = call("eval", command, "--data", str(tmp_path / "nowhere"))
    assert (code, out) == (2, "") and "nowhere: no such folder" in err
    code, out, err = call("eval", command, "--data", str(tmp_path))
    assert (code, out) == (2, "") and f"--data {tmp_path}: no " in err


def test_a_package_that_is_missing_is_named(call, tmp_path, tokenizer, monkeypatch):
    data = field_data.longbench(tmp_path, tokenizer)
    field_data.write_lines(data / "dureader.jsonl", [{}])
    monkeypatch.setitem(sys.modules, "jieba", None)
    code, _, err = call("eval", "longbench", "--data", str(data), "--task", "dureader")
    assert code == 2
    assert (
        "--task dureader needs jieba, which is not installed: pip install 'mlx-snapkv[data]'" in err
    )
