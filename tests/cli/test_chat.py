"""The chat as people use it: from a script, and in a pseudo-terminal."""

import os
import pty
import random
import select
import signal
import subprocess
import sys

import fork_helpers
import pytest

from mlx_snapkv.demo.questions import make_haystack

POLICY = ["--snapkv", "budget=100,n_sink=4,n_window=32,min_ctx=0", "--memory", "recall"]
PROMPT = "\x1b[?2004h"  # pasted text is asked for as such
COMMAND = [sys.executable, "-m", "mlx_snapkv", "chat", "--model", "demo", "-m", "24"]


@pytest.fixture(scope="module")
def document(demo_llama, tmp_path_factory):
    """A file with facts, and the facts."""
    text, facts = make_haystack(demo_llama[1], random.Random(3), 3, 700)
    path = tmp_path_factory.mktemp("chat") / "notes of today.txt"
    path.write_text(text)
    return path, facts


def script(lines, *options):
    command = [*COMMAND, *options]
    done = fork_helpers.run(command, input="\n".join(lines), capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_a_script_gets_answers_on_stdout_and_all_else_on_stderr(document):
    path, facts = document
    lines = [f'/file "{path}"', *(fact.question for fact in facts), "/stats", "/help"]
    code, out, err = script(lines, *POLICY)
    assert code == 0
    assert out.splitlines() == [fact.value for fact in facts]
    assert "notes of today.txt: " in err and "100 entries kept" in err
    assert "entries by layer: 0: 100, 1: 100, 2: 100" in err and "tokens/s" in err
    assert all(f"\n{command} " in err for command in ("/file", "/reset", "/policy", "/quit"))


def test_rows_can_rest_in_a_file(document):
    path, facts = document
    lines = [f"/file {path}", *(fact.question for fact in facts), "/stats"]
    code, out, err = script(lines, *POLICY[:-1], "recall:file")
    assert (code, out.splitlines()) == (0, [fact.value for fact in facts])
    assert "KV memory held between turns: 0 B, " in err and " in files; prompt" in err


def test_answers_are_decoded_from_quantised_rows(document):
    path, facts = document
    lines = [f"/file {path}", *(fact.question for fact in facts), "/stats"]
    code, out, err = script(lines, *POLICY, "--kv-bits", "8", "--kv-group-size", "32")
    assert (code, out.splitlines()) == (0, [fact.value for fact in facts])
    assert "100 entries kept" in err
    code, out, err = script([], *POLICY, "--kv-bits", "8", "--kv-group-size", "128")
    assert (code, out, err.count("\n")) == (2, "", 1) and "must be one of [32, 64]" in err


def test_an_unknown_memory_is_one_line():
    code, out, err = script([], *POLICY[:-1], "recall:2bit")
    assert (code, out) == (2, "") and "or recall:file, got 'recall:2bit'" in err


def test_reset_policy_and_system_start_again(document):
    path, facts = document
    lines = [f"/file {path}", facts[0].question, "/reset", "/stats", "/policy none", "/policy"]
    code, out, err = script([*lines, "/system Be brief.", "/quit", "never sent"], *POLICY)
    assert code == 0 and out.splitlines() == [facts[0].value]
    for words in ("is forgotten", "nothing has been said yet", "with policy none", "policy: none"):
        assert words in err
    assert "with that system prompt" in err


def test_a_conversation_is_saved_and_loaded_in_another_chat(document, tmp_path):
    path, facts = document
    base = tmp_path / "talk of today.safetensors"
    code, out, err = script([f"/file {path}", facts[0].question, f'/save "{base}"'], *POLICY)
    assert (code, out.splitlines()) == (0, [facts[0].value]) and "saved in" in err
    code, out, err = script([f'/load "{base}"', facts[1].question, "/stats"])
    assert (code, out.splitlines()) == (0, [facts[1].value])
    assert "tokens loaded, policy snapkv" in err and "100 entries kept" in err


def test_a_files_own_settings_end_with_it(document, tmp_path):
    """What the command line asked for is what the next full cache, and a new start, get."""
    path, facts = document
    own, full = tmp_path / "own.safetensors", tmp_path / "full.safetensors"
    script([f"/file {path}", facts[0].question, f"/save {own}"], "--policy", "keydiff:budget=300")
    script([f"/file {path}", facts[0].question, f"/save {full}"])
    lines = [f"/load {own}", f"/load {full}", *(fact.question for fact in facts), "/stats"]
    code, out, err = script([*lines, "/reset", f"/file {path}", facts[1].question], *POLICY)
    assert (code, out.splitlines()) == (0, [f.value for f in (*facts, facts[1])])
    assert "policy keydiff:budget=300, memory drop, as it was saved" in err
    assert "memory recall\n" in err and "100 entries kept" in err


def test_a_text_that_cache_prompt_saved_can_be_asked_about(document, tmp_path):
    path, facts = document
    base = str(tmp_path / "notes.safetensors")
    options = ["--model", "demo", "--prompt-file", str(path), "-o", base]
    made = [sys.executable, "-m", "mlx_snapkv", "cache-prompt", *options]
    fork_helpers.run([*made, "--policy", "keydiff:budget=300"], check=True, capture_output=True)
    code, out, err = script([f"/load {base}", facts[0].question, facts[1].question])
    assert (code, out.splitlines()) == (0, [fact.value for fact in facts[:2]])
    assert "policy keydiff:budget=300" in err


def test_a_backslash_joins_lines():
    code, out, err = script(["/sys\\", "tem"], *POLICY)
    assert code == 2 and "unknown command /sys" in err and out == ""


@pytest.mark.parametrize(
    "line, words",
    [
        ("/fiel x", "unknown command /fiel (did you mean '/file'?)"),
        ("/file nowhere.txt", "/file nowhere.txt: No such file or directory"),
        ("/save x.safetensors", "nothing has been said yet"),
        ("/load nowhere.safetensors", "nowhere.safetensors"),
        ("/file", "/file needs the name of a file"),
        ("/policy keydif", "did you mean 'keydiff'?"),
    ],
)
def test_a_mistake_in_a_script_ends_it_with_one_line(line, words):
    code, out, err = script([line, "never sent"])
    assert (code, out) == (2, "") and words in err and len(err.strip().splitlines()) == 1


def test_a_seed_that_there_is_not_is_one_line():
    done = fork_helpers.run([*COMMAND, "--seed", "-1"], input="", capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--seed" in done.stderr and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii:strict"])
def test_bytes_that_are_no_text_are_refused(encoding):
    environment = os.environ | {"PYTHONIOENCODING": encoding}
    text = b"\xff\xfe bad\n"
    done = subprocess.run(COMMAND, input=text, capture_output=True, env=environment)
    assert (done.returncode, done.stdout) == (2, b"")
    assert (
        done.stderr == b"mlx-snapkv: standard input is not UTF-8 text: convert it to text first\n"
    )


def test_a_closed_standard_input_is_one_line():
    closed = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *COMMAND], capture_output=True, text=True
    )
    assert (closed.returncode, closed.stdout) == (2, "")
    assert closed.stderr.startswith("mlx-snapkv: standard input is closed")


class Terminal:
    """A chat in a pseudo-terminal."""

    def __init__(self, *options):
        self.fd, its = pty.openpty()
        self.process = fork_helpers.Popen(
            [*COMMAND, *options], stdin=its, stdout=its, stderr=its, start_new_session=True,
            env=os.environ | {"TERM": "xterm"},
        )  # fmt: skip
        os.close(its)
        self.seen = ""

    def wait_for(self, text):
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], fork_helpers.AT_MOST)
            assert ready, f"{text!r} never came: {self.seen!r}"
            self.seen += os.read(self.fd, 65536).decode(errors="replace")
            if "\x1b[6n" in self.seen:  # prompt_toolkit asks where the cursor is
                self.seen = self.seen.replace("\x1b[6n", "")
                os.write(self.fd, b"\x1b[1;1R")
        self.seen = self.seen.partition(text)[2]

    def type(self, text):
        os.write(self.fd, text.encode())

    def exit_code(self):
        try:
            while os.read(self.fd, 65536):
                pass
        except OSError:  # the other end is closed
            pass
        return self.process.wait()

    def close(self):
        self.process.kill()
        os.close(self.fd)


@pytest.fixture
def terminal():
    made = []

    def start(*options):
        made.append(Terminal(*options))
        return made[-1]

    yield start
    for each in made:
        each.close()


def test_in_a_terminal_mistakes_do_not_end_it_and_end_of_file_does(terminal, document):
    path, facts = document
    chat = terminal(*POLICY)
    chat.wait_for("/help lists commands")
    chat.wait_for(PROMPT)
    chat.type("/fiel\r")
    chat.wait_for("did you mean '/file'?")
    chat.type(f"/file {path}\r")
    chat.wait_for("to be read with your next message")
    chat.type(f"{facts[1].question}\r")
    chat.wait_for(facts[1].value)
    chat.wait_for(PROMPT)
    chat.type("\x04")
    assert chat.exit_code() == 0


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(terminal, document):
    path, _ = document
    chat = terminal(*POLICY, "-m", "100000")
    chat.wait_for(PROMPT)
    chat.type("once upon a time\r")  # the model babbles without end
    chat.wait_for("reading the prompt")
    chat.wait_for("\x1b[?25h")  # the bar is gone, and the cursor is back
    chat.wait_for(". ")
    chat.process.send_signal(signal.SIGINT)
    chat.wait_for("the conversation goes on")
    chat.type("/stats\r")
    chat.wait_for("tokens/s")
    chat.type(f"/file {path}\r")
    chat.wait_for("to be read")
    chat.type("/quit\r")
    assert chat.exit_code() == 0
