"""Commands that mlx.launch has started, and what they refuse there."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from several_helpers import LIMIT, ROOT, free_ports, started

LAUNCH = str(Path(sys.executable).with_name("mlx.launch"))
POLICY = "snapkv:budget=pyramid:128,n_sink=4,n_window=32,min_ctx=0"


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
        (["eval", "needle"], "mlx-snapkv eval does not run on several Macs yet"),
        (["generate", "--model", "demo-qwen3-next", "--prompt", "x"], "add --pipeline"),
    ],
)  # fmt: skip
def test_what_does_not_run_is_refused_by_all(tmp_path, command, sentence):
    for code, said in started(tmp_path, "-m", "mlx_snapkv", *command, limit=60):
        assert code == 2 and sentence in said and "Traceback" not in said
