"""Command lines that several tests use, and helpers that run them."""

import io
import re
import sys

import pytest

MODULE = [sys.executable, "-m", "mlx_snapkv"]
LEAD = "The access code of the amber falcon is 482913. It was cold. The access code of the amber falcon is"
RAW = ["generate", "--model", "demo", "--ignore-chat-template", "-m", "6"]
PLAIN = [*RAW, "--prompt", LEAD]  # answered 482913


def caller(main, monkeypatch, capsys):
    """Return a function `(*args, stdin=)` that runs a command's `main`, and returns (exit code, stdout, stderr).

    The command runs in this process, because starting Python would take most of the time.
    """

    def call(*args, stdin=b""):
        monkeypatch.setattr(sys, "argv", ["mlx-snapkv", *args])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as exit:
            main()
        return exit.value.code, *capsys.readouterr()

    return call


def refuser(call):
    """Return a function that runs a command, asserts that it fails with a mistake, and returns its one line on stderr.

    A note about float32, which is printed when a model loads, is ignored.
    """

    def refused(*args, **how):
        code, out, err = call(*args, **how)
        err = re.sub(".*: computing in float32.*\n", "", err)
        assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("mlx-snapkv: ")
        return err

    return refused
