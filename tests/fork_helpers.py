"""`subprocess.run` and `subprocess.Popen` for Python command lines that need the package, without importing it again.

Each is a process of its own, forked from one that has imported the package and done nothing else. Only Linux can: on a
Mac the frameworks under MLX don't survive a fork, so there these are subprocess' own.
"""

from __future__ import annotations

import functools
import os
import pickle
import select
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import PIPE, CalledProcessError, CompletedProcess, TimeoutExpired

from fork_server import LENGTH

CAN_FORK = sys.platform == "linux"
AT_MOST = 900  # seconds: a command that takes that long hangs, on any machine


@functools.cache
def _started() -> tuple[socket.socket, subprocess.Popen]:
    """The connection to this test run's server, and the server: it ends with the connection."""
    ours, its = socket.socketpair()
    server = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("fork_server.py")), str(its.fileno())],
        pass_fds=[its.fileno()],
        stdin=PIPE,  # pipes, as the children's streams will be
        stdout=PIPE,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # which starts threads on import
    )
    its.close()
    return ours, server


class ForkedProcess:
    """What is used of a `Popen`.

    Args:
        command: the interpreter, `-m` or `-c`, a module or a program, and arguments.
        start_new_session: if standard input is a terminal, it is the session's.

    Attributes:
        threads: how many the server had when it forked.
    """

    def __init__(
        self, command, *, stdin=None, stdout=None, stderr=None, text=False, env=None, cwd=None,
        start_new_session=False,
    ):  # fmt: skip
        assert command[0] == sys.executable and command[1] in ("-m", "-c"), command
        self.args, self.text, self.returncode = command, text, None
        ends = [_ends(stream, number) for number, stream in enumerate((stdin, stdout, stderr))]
        self._status, its_status = socket.socketpair()
        request = {
            "arguments": command[1:],
            "cwd": os.path.abspath(cwd or os.curdir),
            "env": {os.fsencode(k): os.fsencode(v) for k, v in (env or os.environ).items()},
            "start_new_session": start_new_session,
        }
        data = pickle.dumps(request)
        fds = [its for its, _ in ends]
        server, _ = _started()
        socket.send_fds(server, [LENGTH.pack(len(data))], [*fds, its_status.fileno()])
        server.sendall(data)
        its_status.close()
        for its, ours in ends:
            if ours is not None:
                os.close(its)
        self.stdin, self.stdout, self.stderr = (
            None if ours is None else os.fdopen(ours, mode + ("" if text else "b"))
            for (_, ours), mode in zip(ends, "wrr")
        )
        self.pid, self.threads = self._number(), self._number()

    def _number(self):
        data = self._status.recv(LENGTH.size, socket.MSG_WAITALL)
        assert len(data) == LENGTH.size, "the fork server has ended"
        return LENGTH.unpack(data)[0]

    def poll(self):
        return self.returncode if self._ended_within(0) else None

    def wait(self, timeout=AT_MOST):
        if not self._ended_within(timeout):
            raise TimeoutExpired(self.args, timeout)
        return self.returncode

    def _ended_within(self, timeout):
        if self.returncode is None and select.select([self._status], [], [], timeout)[0]:
            self.returncode = os.waitstatus_to_exitcode(self._number())
            self._status.close()
        return self.returncode is not None

    def send_signal(self, signal):
        if self.poll() is None:
            os.kill(self.pid, signal)

    def kill(self):
        self.send_signal(9)

    def communicate(self, input=None):
        with ThreadPoolExecutor(3) as pool:
            if self.stdin is not None:
                pool.submit(_feed, self.stdin, input)
            read = [stream and pool.submit(_drain, stream) for stream in (self.stdout, self.stderr)]
            try:
                self.wait()
            except TimeoutExpired:
                self.kill()  # which ends the readers too
                raise
        return tuple(future and future.result() for future in read)


def _ends(stream, number):
    """A child's end of a stream, and this process' end of it where that is a new one."""
    if stream == PIPE:
        read, write = os.pipe()
        return (read, write) if number == 0 else (write, read)
    fd = number if stream is None else stream if isinstance(stream, int) else stream.fileno()
    return fd, None


def _feed(stream, data):
    try:
        with stream:
            if data:
                stream.write(data)
    except BrokenPipeError:  # it has gone without reading all
        pass


def _drain(stream):
    with stream:
        return stream.read()


def forked_run(command, *, input=None, capture_output=False, check=False, **options):
    """As `subprocess.run`."""
    if input is not None:
        options["stdin"] = PIPE
    if capture_output:
        options["stdout"] = options["stderr"] = PIPE
    process = ForkedProcess(command, **options)
    out, err = process.communicate(input)
    if check and process.returncode:
        raise CalledProcessError(process.returncode, command, out, err)
    return CompletedProcess(command, process.returncode, out, err)


run, Popen = (forked_run, ForkedProcess) if CAN_FORK else (subprocess.run, subprocess.Popen)
