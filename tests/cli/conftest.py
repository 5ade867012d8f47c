import contextlib
import os
import pty
import random
import select

import fork_helpers
import pytest
from batch_file_helpers import read, write
from command_lines import MODULE, caller, refuser

from mlx_snapkv.cli import app
from mlx_snapkv.demo.questions import make_haystack


@pytest.fixture
def call(monkeypatch, capsys):
    return caller(app.main, monkeypatch, capsys)


@pytest.fixture
def refused(call):
    return refuser(call)


@pytest.fixture(scope="session")
def text_file(demo_llama):
    """Return a function that writes a text of `n_tokens` with facts, and returns the path and the facts."""

    def make(path, n_tokens, seed=0, n_facts=3):
        text, facts = make_haystack(demo_llama[1], random.Random(seed), n_facts, n_tokens)
        path.write_text(text)
        return path, facts

    return make


@pytest.fixture(scope="module")
def story(text_file, tmp_path_factory):
    return text_file(tmp_path_factory.mktemp("book") / "story.txt", 1500, n_facts=4)


@pytest.fixture(scope="module")
def document(text_file, tmp_path_factory):
    return text_file(tmp_path_factory.mktemp("chat") / "notes of today.txt", 700, seed=3)


@pytest.fixture
def save(call):
    """Return a function that saves a text with cache-prompt, and returns stderr."""

    def run(text, file, *options, model="demo"):
        given = ["--model", model, "--prompt-file", str(text), "-o", str(file), *options]
        code, out, err = call("cache-prompt", *given)
        assert (code, out) == (0, "")
        return err

    return run


@pytest.fixture
def ask_saved(call):
    """Return a function that asks a question about a saved prompt, and returns (exit code, stdout, stderr)."""

    def run(file, question, *options, model="demo"):
        asked = ["--prompt-cache-file", str(file), "--prompt", question, "-m", "12", *options]
        return call("generate", "--model", model, *asked)

    return run


class Terminal:
    """A command running in a pseudo-terminal."""

    def __init__(self, *args, start=fork_helpers.Popen, cwd=None, **variables):
        self.fd, its = pty.openpty()
        self.process = start(
            [*MODULE, *args], stdin=its, stdout=its, stderr=its,
            start_new_session=True, env=os.environ | {"TERM": "xterm", **variables}, cwd=cwd,
        )  # fmt: skip
        os.close(its)
        self.seen = self.all = ""

    def _read(self):
        came = os.read(self.fd, 1 << 16).decode(errors="replace")
        self.seen, self.all = self.seen + came, self.all + came
        return came

    def wait_for(self, text, seconds=fork_helpers.AT_MOST):
        while text not in self.seen:
            ready, _, _ = select.select([self.fd], [], [], seconds)
            assert ready, f"{text!r} never came: {self.seen!r}"
            self._read()
            if "\x1b[6n" in self.seen:  # prompt_toolkit asks where the cursor is
                self.seen = self.seen.replace("\x1b[6n", "")
                os.write(self.fd, b"\x1b[1;1R")
        self.seen = self.seen.partition(text)[2]

    def drive(self, *steps):
        """Type each text in turn, and wait for the corresponding output."""
        for typed, wanted in steps:
            os.write(self.fd, typed.encode())
            self.wait_for(wanted)

    def leave(self, typed="/quit\r"):
        """Type a text, wait for the command to end, and return its whole output."""
        os.write(self.fd, typed.encode())
        with contextlib.suppress(OSError):  # the other end is closed
            while self._read():
                pass
        assert self.process.wait() == 0, self.all
        return self.all

    def close(self):
        self.process.kill()
        os.close(self.fd)


@pytest.fixture
def terminal():
    """Yield a function that starts a command in a `Terminal`, which is closed at the end of the test."""
    with contextlib.ExitStack() as ended:

        def start(*args, **how):
            made = Terminal(*args, **how)
            ended.callback(made.close)
            return made

        yield start


@pytest.fixture
def batch(call, tmp_path):
    """Return a function that runs the requests in `r.jsonl`, and returns (exit code, records by custom_id, stderr)."""

    def run(lines, *options, stdin=b""):
        if lines is not None:
            write(tmp_path / "r.jsonl", lines)
        source = "-" if stdin else str(tmp_path / "r.jsonl")
        output = tmp_path / "a.jsonl"
        code, out, err = call(
            "batch", source, "-o", str(output), "--model", "demo", *options, stdin=stdin
        )
        assert out == ""
        return code, read(output) if output.exists() else {}, err

    return run
