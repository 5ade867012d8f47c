"""Commands whose standard streams are closed, full or not read, and commands interrupted with Ctrl-C."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import fork_helpers
import pytest
from command_lines import LEAD, MODULE, PLAIN
from model_folders import change, demo_with

STOPPED = 130, "", "\nmlx-snapkv: stopped\n"


def shell(redirected, *args):
    """Run the command with streams redirected by the shell. Return (exit code, stdout, stderr)."""
    command = ["sh", "-c", f'exec "$@" {redirected}', "sh", *MODULE, *args]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("redirected", ["2>/dev/full", "<&- 2>&-"])
def test_an_answer_needs_neither_stderr_nor_stdin(redirected):
    code, out, err = shell(redirected, *PLAIN)
    assert (code, out) == (0, "482913\n") and "Traceback" not in err


@pytest.fixture(scope="module")
def snowy(tmp_path_factory):
    """Return the built-in model's folder with a tokenizer that decodes every 4 as a snowman."""
    folder = demo_with(tmp_path_factory.mktemp("snowy") / "model")
    file = folder / "tokenizer.json"
    decoder = json.loads(file.read_text())["decoder"]
    snowman = {"type": "Replace", "pattern": {"String": "4"}, "content": "\u2603"}
    change(file, decoder={"type": "Sequence", "decoders": [decoder, snowman]})
    return str(folder)


def snowed(model):
    return ["generate", *model, "-q", "--prompt", LEAD], "", "?82913\n"


@pytest.mark.parametrize("encoding", [("cp1252", "strict"), ("ascii", "surrogateescape")])
def test_letters_that_stdout_lacks_are_replaced(snowy, encoding, call, monkeypatch):
    model = ["--model", snowy, "-m", "6", "--ignore-chat-template"]
    fact = "The access code of the opal oak is 444444."
    question = f"{fact} What is the access code of the opal oak?\n"
    for args, stdin, wanted in (
        snowed(model),
        (["generate", *model, "--json", "--prompt", LEAD], "", "82913"),
        (["compare", *model, "--prompt", LEAD], "", "?82913"),
        (["chat", *model[:-1], "-q"], question, "?????"),
    ):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), *encoding))
        code, _, err = call(*args, stdin=stdin.encode())
        out = sys.stdout.buffer.getvalue().decode(encoding[0])
        assert code == 0 and wanted in out, (args, out, err)


def test_letters_that_the_locale_lacks_are_replaced(snowy):
    args, _, wanted = snowed(["--model", snowy, "-m", "6", "--ignore-chat-template"])
    env = os.environ | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    done = subprocess.run([*MODULE, *args], capture_output=True, env=env)
    assert done.returncode == 0 and wanted in done.stdout.decode("ascii"), done.stderr


def test_a_closed_or_full_stdout_is_one_line():
    closed = "mlx-snapkv: standard output is closed, so the answer can't be written\n"
    assert shell(">&-", *PLAIN) == (1, "", closed)
    for args in ([*PLAIN, "-q"], ["--help"]):
        assert shell(">/dev/full", *args) == (1, "", "mlx-snapkv: No space left on device\n")


@pytest.mark.parametrize("args", [[*PLAIN, "-q"], ["models"]], ids=lambda args: args[0])
def test_a_closed_pipe_is_exit_code_1_without_a_message(args):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([*MODULE, *args], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_tokenising_a_long_text_is_announced_and_stops_at_ctrl_c(tmp_path):
    file = tmp_path / "long.txt"
    file.write_text("It was cold at the market. " * 100_000)

    def tokenising(process):
        return "tokenising the text" in process.stderr.readline()

    assert interrupted(tokenising, *PLAIN, "--prompt-file", str(file)) == STOPPED


def interrupted(ready, *args, start=fork_helpers.Popen):
    """Send Ctrl-C to the command as soon as `ready(process)` is true. Return (exit code, stdout, stderr)."""
    process = start(
        [*MODULE, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    while not ready(process):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    return process.returncode, out, err


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("library", ["pydantic_core", "mlx/core"])
def test_ctrl_c_while_the_program_starts(library):
    def loaded(process):
        return library in Path(f"/proc/{process.pid}/maps").read_text()

    assert interrupted(loaded, *PLAIN, start=subprocess.Popen) == STOPPED


def test_ctrl_c_in_an_answer_closes_it_with_the_figures():
    code, out, err = interrupted(lambda process: process.stdout.read(1), *PLAIN, "-m", "100000")
    assert code == 130 and out.endswith("\n")
    *_, closing, empty, last = err.splitlines()
    assert closing.startswith("stopped: 28 prompt tokens, full cache (no policy") and empty == ""
    assert "generation" in closing and last == "mlx-snapkv: stopped"
