"""The forked processes that stand in for fresh ones: alone, and as `subprocess` would start them."""

import os
import signal
import subprocess
import sys

import fork_helpers
import pytest

PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
COMPUTE = """
import os, sys
import mlx.core as mx
mx.set_default_device(mx.cpu)
x = mx.random.normal((500, 500), key=mx.random.key(3))
print(mx.allclose(x @ mx.ones(500), x.sum(1), atol=1e-3).item(), os.getpid(), sys.argv[1:])
"""

needs_fork = pytest.mark.skipif(not fork_helpers.CAN_FORK, reason="processes are fresh here")


def python(program, *args, **options):
    command = [sys.executable, "-c", program, *args]
    return fork_helpers.run(command, capture_output=True, text=True, **options)


@needs_fork
def test_the_server_has_one_thread_when_it_forks_and_the_child_computes():
    pids = set()
    for _ in range(3):
        command = [sys.executable, "-c", COMPUTE, "a b", "\udcff"]
        process = fork_helpers.Popen(command, **PIPES, text=True)
        assert process.threads == 1
        out, err = process.communicate()
        assert (process.returncode, err) == (0, "")
        done, pid, rest = out.split(maxsplit=2)
        assert (done, rest) == ("True", "['a b', '\\udcff']\n")
        pids.add(int(pid))
    assert len(pids) == 3 and os.getpid() not in pids


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


def test_much_output_and_a_reader_that_has_gone():
    done = python("import sys; print('y' * 1_000_000); print('z' * 1_000_000, file=sys.stderr)")
    assert (len(done.stdout), len(done.stderr)) == (1_000_001, 1_000_001)
    command = [sys.executable, "-c", "for i in range(10**6): print(i)"]
    process = fork_helpers.Popen(command, **PIPES, text=True)
    process.stdout.close()
    process.stdin.close()
    assert "BrokenPipeError" in process.stderr.read() and process.wait() != 0
    process.stderr.close()


def test_signals_reach_it_and_several_run_at_once():
    wait = "import sys; print('ready', flush=True); sys.stdin.read(); print('done')"
    processes = [
        fork_helpers.Popen([sys.executable, "-c", wait], **PIPES, text=True) for _ in range(3)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n" and process.poll() is None
    processes[0].send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in processes[0].communicate()[1]
    processes[1].kill()
    processes[1].communicate()
    assert processes[2].communicate()[0] == "done\n"
    assert [p.returncode for p in processes] == [-signal.SIGINT, -signal.SIGKILL, 0]
