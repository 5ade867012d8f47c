"""Commands that mlx.launch has started, and what they refuse there."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from batch_file_helpers import SNAPKV, chat, read, said, text, write
from several_helpers import LIMIT, ROOT, free_ports, started

LAUNCH = str(Path(sys.executable).with_name("mlx.launch"))
POLICY = "snapkv:budget=pyramid:128,n_sink=4,n_window=32,lookahead=4"


def launched(*command):
    """What `mlx.launch -n 2` prints of a command: stdout, stderr."""
    port = str(free_ports(1)[0])
    process = subprocess.Popen(
        [LAUNCH, "-n", "2", "--backend", "ring", "--starting-port", port, "--env", f"PYTHONPATH={ROOT}",
         "--", sys.executable, "-m", "mlx_snapkv", *command],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        return process.communicate(timeout=LIMIT)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def story(ask, demo_llama, tmp_path_factory):
    tokens, fact = ask(demo_llama[1], 600, 3)
    path = tmp_path_factory.mktemp("several") / "story.txt"
    path.write_text(demo_llama[1].decode(tokens).split(fact.question)[0])
    return path, fact


def one(*command):
    done = subprocess.run(
        [sys.executable, "-m", "mlx_snapkv", *command],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_print_once_what_one_prints(story):
    path, fact = story
    command = ["generate", "--model", "demo", "--prompt-file", str(path), "--prompt", fact.question,
               "--policy", POLICY, "--json"]  # fmt: skip
    out, err = launched(*command)
    found, wanted = json.loads(out), json.loads(one(*command))
    assert found["text"] == wanted["text"]
    for name in ("entries_kept", "kv_bytes_before", "kv_bytes_after"):
        assert found["compression"][name] == wanted["compression"][name]
    assert err.count("prompt tokens,") == 1 and " on 2 ranks " in err


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (
            ["serve", "--model", "demo", "--port", "0", "--prefix-dir", "known"],
            "--prefix-dir does not go together with several Macs",
        ),
        (["generate", "--model", "demo-qwen3-next", "--prompt", "x"], "add --pipeline"),
    ],
)  # fmt: skip
def test_what_does_not_run_is_refused_by_all(tmp_path, command, sentence):
    for code, printed in started(tmp_path, "-m", "mlx_snapkv", *command, limit=60):
        assert code == 2 and sentence in printed and "Traceback" not in printed


def test_two_answer_a_file_of_requests_as_one_does(tmp_path):
    requests = [
        *(chat(f"chat {n}", 20 * n, max_tokens=4 + n) for n in range(3)),
        "no json",
        text("sampled", 20, max_tokens=12, temperature=3.0, top_p=0.9, logit_bias={"5": 1.0}),
        text("stop", 20, max_tokens=30, stop=["913", "never"]),
    ]
    file = write(tmp_path / "r.jsonl", requests)
    command = ["batch", str(file), "--model", "demo", "--policy", SNAPKV, "--seed", "3",
               "--concurrency", "3", "--max-kv-bytes", "3MB", "-o"]  # fmt: skip
    one(*command, str(tmp_path / "one.jsonl"))
    lines = (tmp_path / "one.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "two.jsonl").write_bytes(lines[0])  # from which it goes on
    for code, printed in started(
        tmp_path, "-m", "mlx_snapkv", *command, str(tmp_path / "two.jsonl")
    ):
        assert code == 0, printed
    found, wanted = read(tmp_path / "two.jsonl"), read(tmp_path / "one.jsonl")
    assert {name: said(record) for name, record in found.items()} == {
        name: said(record) for name, record in wanted.items()
    }


def test_two_evaluate_as_one_does(tmp_path):
    command = ["eval", "needle", "--length", "400", "--depths", "2",
               "--policy", POLICY.replace("128", "64"), "--output"]  # fmt: skip
    one(*command, str(tmp_path / "one"))
    wanted = (tmp_path / "one.jsonl").read_text().splitlines()
    (tmp_path / "two.jsonl").write_text("\n".join(wanted[:2]) + "\n")
    for code, printed in started(tmp_path, "-m", "mlx_snapkv", *command, str(tmp_path / "two")):
        assert code == 0, printed
    assert sorted((tmp_path / "two.jsonl").read_text().splitlines()) == sorted(wanted)
