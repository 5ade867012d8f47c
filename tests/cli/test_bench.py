import json
import sys

import fork_helpers
import pytest

SMALL = ["--context", "1024", "-n", "1", "--steps", "1"]
SMALL += ["--long-prompts", "3000", "--verified", "1024"]


def run(*args):
    done = fork_helpers.run(
        [sys.executable, "-m", "mlx_snapkv", "bench", *args],
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


def test_tables_files_and_plots(tmp_path):
    base = tmp_path / "folder" / "result"
    base.parent.mkdir()
    code, out, err = run(
        "--model",
        "demo",
        *SMALL,
        "-p",
        "1024",
        "--needle",
        "--questions",
        "1",
        "--output",
        str(base),
    )
    assert code == 0, err
    for title in (
        "Decoding by context length",
        "Whole requests",
        "Reading within a fixed budget",
        "Retrieval",
    ):
        assert title in out
    assert "…" not in out
    assert "decoding 1/1" in err and "whole requests 5/5" in err
    assert {p.name for p in base.parent.iterdir()} == {
        "result.json", "result.md", "result-decoding.png", "result-memory.png",
        "result-verified.png",
    }  # fmt: skip
    result = json.loads((base.parent / "result.json").read_text())
    assert result["command"].startswith("mlx-snapkv bench --model demo --context 1024")
    assert {"versions", "commit", "machine"} <= set(result)
    assert all(result[name] for name in ("decode", "verified", "requests", "bounded", "needle"))
    assert (base.parent / "result-decoding.png").read_bytes().startswith(b"\x89PNG")


def test_a_book_is_measured_alone(tmp_path):
    code, out, err = run(
        "--model", "demo", "--book", "--long-prompts", "3000", "--output", str(tmp_path / "result")
    )  # fmt: skip
    assert code == 0, err
    assert "Reading a book" in out and "Asking a book" in out and "…" not in out
    assert "Decoding" not in out and "books 6/6" in err
    assert {p.name for p in tmp_path.iterdir()} == {
        "result.json", "result.md", "result-peak.png", "result-seconds.png",
    }  # fmt: skip


def test_batches_are_measured_alone(tmp_path):
    code, out, err = run(
        "--model", "demo", "--batches", "1,2", "-p", "1024", "--steps", "2",
        "--output", str(tmp_path / "result"),
    )  # fmt: skip
    assert code == 0, err
    assert "Decoding many requests together" in out and "Many prompts at once" in out
    assert "…" not in out and "Whole requests" not in out and "batches 6/6" in err
    assert {p.name for p in tmp_path.iterdir()} == {
        "result.json", "result.md", "result-throughput.png",
    }  # fmt: skip
    assert "![throughput](result-throughput.png)" in (tmp_path / "result.md").read_text()


@pytest.mark.parametrize(
    "args, words",
    [
        (["--needle"], "--needle needs a model that can answer"),
        (["--server", "2"], "--server needs a model that can answer"),
        (["--model", "demo", "--server", "0"], "--server must be whole numbers from 1"),
        (
            ["--context", "4k"],
            "--context must be whole numbers from 1024 to 10000000, with commas, got '4k'",
        ),
        (["--book", "--long-prompts", "2000"], "--long-prompts must be whole numbers from 2560"),
        (["--batches", "0"], "--batches must be whole numbers from 1"),
        (["--batches", "1", "-p", "512"], "--prompt-tokens must be whole numbers from 1024"),
        (["--snapkv", "topk=4"], "topk"),
        (["--output", "/dev/null/x"], "--output /dev/null/x: "),
        (["--model", "nowhere"], "--model nowhere: no such folder"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_measured(args, words):
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert words in err and len(err.strip().splitlines()) == 1
