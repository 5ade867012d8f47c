"""The real command: exact output, exit codes, no tracebacks."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from model_folders import demo_with

from mlx_snapkv.demo.questions import make_haystack

MODULE = [sys.executable, "-m", "mlx_snapkv"]
INSTALLED = [str(Path(sys.executable).with_name("mlx-snapkv"))]


def run(*args, command=MODULE):
    """The command as a user starts it: (exit code, stdout, stderr)."""
    done = subprocess.run([*command, *args], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


LEAD = "The access code of the amber falcon is 482913. It was cold. The access code of the amber falcon is"
PLAIN = ["generate", "--model", "demo", "--ignore-chat-template", "-m", "6", "--prompt", LEAD]


@pytest.mark.parametrize("command", [MODULE, INSTALLED], ids=["python -m", "installed"])
def test_the_answer_goes_to_stdout_and_the_figures_to_stderr(command):
    if not Path(command[0]).exists():
        pytest.skip("the package is not installed here")
    code, out, err = run(*PLAIN, command=command)
    assert (code, out) == (0, "482913\n")
    *_, closing = err.strip().splitlines()
    assert re.fullmatch(
        r"\d+ prompt tokens, full cache \(no policy; --policy auto takes one where it helps\) \| "
        r"prompt [\d.]+ tokens/s, generation [\d.]+ tokens/s, peak memory [\d.]+ GB",
        closing,
    )


def test_compression_is_reported(call, tmp_path):
    file = tmp_path / "document.txt"
    file.write_text(("It was cold at the market. " * 40) + LEAD)
    code, out, err = call(
        "generate", "--model", "demo", "--ignore-chat-template", "-m", "6", "--prompt-file", str(file),
        "--snapkv", "top_k=16,n_sink=4,n_window=32,lookahead=4",
    )  # fmt: skip
    assert code == 0 and out.strip() == "482913"
    closing = err.strip().splitlines()[-1]
    assert re.search(
        r"prompt tokens, 52 entries kept, KV memory [\d.]+ [kM]B → [\d.]+ kB \(float32, with room for more\) \| prompt",
        closing,
    )


def test_json_holds_answer_figures_and_report(call):
    code, out, _ = call(
        *PLAIN, "--json", "--snapkv", "top_k=4,n_sink=2,n_window=16,obs_window=8,lookahead=4"
    )
    result = json.loads(out)
    assert code == 0
    assert result["model"] == "demo"
    assert set(result) == {
        "model", "text", "prompt_tokens", "prompt_tps", "generation_tokens", "generation_tps", "finish_reason",
        "peak_memory_gb", "compression",
    }  # fmt: skip
    assert result["compression"]["entries_kept"] == [22, 22, 22]
    assert result["compression"]["reason"] is None


def test_stdin_and_file_make_one_prompt(call, tmp_path):
    first, rest = LEAD.split(" It was cold. ")
    args = ["generate", "--model", "demo", "--ignore-chat-template", "-m", "6", "--quiet"]
    file = tmp_path / "fact.txt"
    file.write_text(first)
    expected = call(*args, "--prompt", f"{first}\\n\\n{rest}")
    assert expected[0] == 0 and "482913" in expected[1]
    assert call(*args, "--prompt", "-", stdin=f"{first}\n\n{rest}".encode()) == expected
    assert call(*args, "--prompt-file", str(file), "--prompt", rest) == expected
    assert call(*args, "--prompt-file", "-", "--prompt", rest, stdin=first.encode()) == expected


@pytest.fixture
def without_own_caches(tmp_path):
    """The embedded model as one of a type that leaves its caches to mlx-lm."""
    return str(demo_with(tmp_path / "seed_oss", model_type="seed_oss", attention_out_bias=False))


def test_a_rotating_cache(call, without_own_caches, tmp_path):
    asked = ["generate", "--model", without_own_caches, "--ignore-chat-template", "-m", "6"]
    file = tmp_path / "document.txt"
    file.write_text(("It was cold at the market. " * 200) + LEAD)
    code, out, err = call(*asked, "--prompt-file", str(file), "--max-kv-size", "128")
    assert (code, out) == (0, "482913\n")
    assert "mlx-lm's rotating cache of 128 entries (no policy" in err and "full cache" not in err


def test_output_that_cannot_be_written_is_one_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*MODULE, *PLAIN, "--quiet"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (1, "mlx-snapkv: No space left on device\n")


def test_help_version_and_no_command(call):
    assert call("--version") == (0, "0.1.0\n", "")
    code, out, _ = call()
    assert code == 0 and "generate" in out and "demo" in out
    code, out, _ = call("generate", "--help")
    assert code == 0 and "--prefill-step-size" in out and "mlx-snapkv generate --model demo" in out
    code, _, err = call("nonsense")
    assert (code, err) == (2, "mlx-snapkv: No such command 'nonsense'.\n")


def test_the_share_of_drafted_tokens_is_told(call):
    args = [*PLAIN, "--snapkv", "top_k=4,n_sink=2,n_window=16,obs_window=8,lookahead=1"]
    drafted = [*args, "--draft-model", "demo", "--num-draft-tokens", "2"]
    code, out, err = call(*drafted)
    assert (code, out) == call(*args)[:2]
    assert re.search(r"generation [\d.]+ tokens/s \(\d+% of the tokens drafted\), peak", err)
    rate = json.loads(call(*drafted, "--json")[1])["acceptance_rate"]
    assert 0 < rate < 1


RECALLED = ["--snapkv", "top_k=20,n_sink=4,n_window=24,obs_window=16,lookahead=0"]


@pytest.fixture(scope="module")
def asked(demo_llama, tmp_path_factory):
    """A file of 1,500 tokens, a question about it, and the answer."""
    text, facts = make_haystack(demo_llama[1], random.Random(0), 4, 1500)
    path = tmp_path_factory.mktemp("recall") / "story.txt"
    path.write_text(text)
    command = ["generate", "--model", "demo", "--prompt-file", str(path), "-m", "12"]
    return [*command, "--prompt", facts[0].question], facts[0].value


@pytest.mark.parametrize(
    "options, closing",
    [
        (
            ["--memory", "recall"],
            r" read by every token, KV memory [^|]*, all \d+ in memory as well ",
        ),
        (
            ["--memory", "recall:file:8bit", "--refresh", "turn"],
            r" entries kept, [^|]*, all \d+ in files in 8 bits as well ",
        ),
        (
            ["--memory", "recall", "--verify", "all"],
            r", \d+% of the tokens drafted, [\d.]+ times as fast as the full cache ",
        ),
    ],
)
def test_an_answer_that_recalls(call, asked, options, closing):
    command, value = asked
    code, out, err = call(*command, *RECALLED, *options)
    assert code == 0 and re.search(rf"{closing}\| prompt", err.splitlines()[-1])
    if "--verify" in options:
        assert out == value + "\n"
        code, out, err = call(*command, *RECALLED, *options, "--json", "--quiet")
        verified = json.loads(out)["compression"]["verified"]
        assert verified["tokens"] > 0 and err == ""
