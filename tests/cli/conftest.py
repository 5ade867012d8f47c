"""The command line as several tests call it."""

import io
import sys
import tempfile

import pytest

from mlx_snapkv.cli import app


@pytest.fixture
def call(monkeypatch, capsys):
    """The command in this process, where starting Python would take most of the time: (exit code, stdout, stderr)."""

    def invoke(*args, stdin=b""):
        monkeypatch.setattr(tempfile, "tempdir", tempfile.tempdir)  # which --store-dir sets
        monkeypatch.setattr(sys, "argv", ["mlx-snapkv", *args])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        with pytest.raises(SystemExit) as exit:
            app.main()
        return exit.value.code, *capsys.readouterr()

    return invoke
