"""The forked processes that stand in for fresh ones: alone, and as `subprocess` would start them."""

import os
import signal
import subprocess
import sys

import fork_helpers
import pytest


def python(program, *args, **options):
    command = [sys.executable, "-c", program, *args]
    return fork_helpers.run(command, capture_output=True, text=True, **options)


# What is started in the background ignores the signal, and so do its children.
ANSWERING = "import os, signal; signal.signal(signal.SIGINT, signal.default_int_handler)"


@pytest.mark.parametrize(
    "program, code",
    [
        ("", 0),
        ("raise SystemExit(7)", 7),
        (f"{ANSWERING}; os.kill(os.getpid(), signal.SIGINT); input()", -signal.SIGINT),
        ("1 / 0", 1),
        ("import atexit; atexit.register(print, 'bye')", 0),
    ],
)
def test_it_ends_as_a_fresh_process_does(program, code):
    forked = python(program)
    fresh = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert forked.returncode == fresh.returncode == code
    assert forked.stdout == fresh.stdout
    assert forked.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]


def test_streams_folder_and_environment_are_its_own(tmp_path):
    program = "import os, sys; print(os.getcwd(), os.environ['MINE'], len(sys.stdin.read()))"
    text = "x" * 1_000_000
    done = python(program, input=text, cwd=tmp_path, env=os.environ | {"MINE": "yes"})
    assert done.stdout == f"{tmp_path} yes 1000000\n" and "MINE" not in os.environ
    done = python("import os; print('MINE' in os.environ, end='')")
    assert done.stdout == "False"
