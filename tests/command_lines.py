"""Command lines that several tests give, and how they are given."""

import io
import re
import sys

import pytest

MODULE = [sys.executable, "-m", "mlx_snapkv"]
LEAD = "The access code of the amber falcon is 482913. It was cold. The access code of the amber falcon is"
RAW = ["generate", "--model", "demo", "--ignore-chat-template", "-m", "6"]
PLAIN = [*RAW, "--prompt", LEAD]  # answered 482913


def caller(main, monkeypatch, capsys):
    """call(*args, stdin=) -> (exit code, stdout, stderr) of a command's `main`.

    It runs in this process, where starting Python would take most of the time.
    """

    def call(*args, stdin=b""):
        monkeypatch.setattr(sys, "argv", ["mlx-snapkv", *args])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as exit:
            main()
        return exit.value.code, *capsys.readouterr()

    return call


def refuser(call):
    """refused(*args) -> the one line of a mistake on stderr, after what was said of a model that could be loaded."""

    def refused(*args, **how):
        code, out, err = call(*args, **how)
        err = re.sub(".*: computing in float32.*\n", "", err)
        assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("mlx-snapkv: ")
        return err

    return refused
