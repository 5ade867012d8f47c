"""`subprocess.run` and `subprocess.Popen` for Python commands, without importing the package again.

Each command is forked by multiprocessing's fork server, which has imported the package but computed nothing, because
MLX's threads must not be copied by a fork. On a Mac, the frameworks under MLX don't survive a fork, so these names are
subprocess's own there.
"""

import atexit
import contextlib
import functools
import os
import pickle
import runpy
import select
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from subprocess import TimeoutExpired
from unittest import mock

CAN_FORK = sys.platform == "linux"
AT_MOST = 900  # seconds; a command that takes longer hangs, on any machine
IMPORTED = """fork_helpers mlx_lm prompt_toolkit transformers mlx_snapkv.api mlx_snapkv.measure.speed mlx_snapkv.cli.app
mlx_snapkv.measure.compare""".split()


@dataclass
class Program:
    """A Python command that multiprocessing's fork server unpickles and runs in a forked process."""

    arguments: list[str]  # `-m` or `-c`, a module or a program, and its arguments
    cwd: str
    env: dict[bytes, bytes]
    leads_session: bool

    def _bootstrap(self, parent_sentinel: int) -> int:
        """Run the command, and end as the interpreter would. Return the exit code."""
        code: object = None
        try:
            self._set_up()
            option, what, *arguments = self.arguments
            sys.argv = [option, *arguments]
            if option == "-m":
                runpy.run_module(what, run_name="__main__", alter_sys=True)
            else:
                exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
        except SystemExit as done:
            code = done.code
        except BaseException as error:
            sys.last_value = error
            sys.excepthook(type(error), error, error.__traceback__)
            code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        if isinstance(code, str):
            print(code, file=sys.stderr)
        threading._shutdown()
        atexit._run_exitfuncs()
        if not code and (generating := sys.modules.get("mlx_lm.generate")):
            # An interpreter does this at its end, because other ranks wait for the results.
            import mlx.core as mx

            mx.synchronize(generating.generation_stream)
            mx.synchronize()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        if code == -signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        return code if isinstance(code, int) else int(code is not None)

    def _set_up(self) -> None:
        import fcntl
        import termios

        signal.signal(signal.SIGINT, signal.default_int_handler)
        for standard, fd in enumerate(forkserver.get_inherited_fds()):
            os.dup2(fd, standard)
            os.close(fd)
        if self.leads_session:
            os.setsid()
            if os.isatty(0):
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.chdir(self.cwd)
        os.environb.clear()
        os.environb.update(self.env)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115  # the server has closed its own
        sys.stdout.reconfigure(line_buffering=os.isatty(1))


@functools.cache
def _server() -> forkserver.ForkServer:
    """Return this test run's fork server, which ends with the test run."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(IMPORTED)
    tests = Path(__file__).parent
    paths = {"PYTHONPATH": os.pathsep.join(map(str, (tests.parent, tests)))}
    # OpenBLAS starts threads on import.
    with mock.patch.dict(os.environ, paths | {"OPENBLAS_NUM_THREADS": "1"}):
        server.ensure_running()
    return server


class ForkedPopen(subprocess.Popen):
    """A process forked by the fork server. Only the server, as its parent, can report the exit code."""

    def _execute_child(self, args, *more):
        assert args[0] == sys.executable and args[1] in ("-m", "-c"), args
        # subprocess passes both ends of the three streams; the child's are at places 0, 3 and 5.
        (cwd, env), ends, leads_session = more[4:6], more[9:15], more[20]
        fds = [number if fd == -1 else fd for number, fd in enumerate((ends[0], ends[3], ends[5]))]
        env = {os.fsencode(k): os.fsencode(v) for k, v in (env or os.environ).items()}
        program = Program(args[1:], os.path.abspath(cwd or os.curdir), env, leads_session)
        self._status, child = _server().connect_to_new_process(fds)
        with open(child, "wb") as file:
            file.write(pickle.dumps({}) + pickle.dumps(program))
        self.pid = forkserver.read_signed(self._status)
        self._child_created = True
        self._close_pipe_fds(*ends)

    def _internal_poll(self, *more, **_):
        return self._ended_within(0)

    def _wait(self, timeout):
        if self._ended_within(AT_MOST if timeout is None else timeout) is None:
            raise TimeoutExpired(self.args, timeout)
        return self.returncode

    def _ended_within(self, timeout):
        """Return the exit code, or None if the process is still running after `timeout` seconds."""
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = forkserver.read_signed(self._status)
            os.close(self._status)
        return self.returncode


def forked_run(command, **options):
    """Run a command as `subprocess.run` does."""
    with mock.patch.object(subprocess, "Popen", ForkedPopen):
        return subprocess.run(command, timeout=AT_MOST, **options)


run, Popen = (forked_run, ForkedPopen) if CAN_FORK else (subprocess.run, subprocess.Popen)
