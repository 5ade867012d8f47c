"""The forked processes that stand in for fresh ones."""

import os
import subprocess
import sys

import fork_helpers
import pytest

# What is started in the background ignores the signal, and so do its children.
PRESSED = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
os.kill(os.getpid(), signal.SIGINT)
input()
"""
OWN = "import os, sys; print(os.getcwd(), os.environ['MINE'], len(sys.stdin.read()))"


@pytest.mark.parametrize(
    "program, code", [(OWN, 0), ("raise SystemExit(7)", 7), (PRESSED, -2), ("1 / 0", 1)]
)
def test_it_ends_as_a_fresh_process_does(program, code, tmp_path):
    how = {"input": "x" * 1_000_000, "cwd": tmp_path, "env": os.environ | {"MINE": "yes"}}
    command = [sys.executable, "-c", program]
    forked, fresh = (
        run(command, capture_output=True, text=True, **how)
        for run in (fork_helpers.run, subprocess.run)
    )
    assert forked.returncode == fresh.returncode == code and forked.stdout == fresh.stdout
    assert forked.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]
    assert "MINE" not in os.environ
