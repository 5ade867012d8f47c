"""A Python that has imported the package once, and forks a process for every command line it is sent.

It runs no MLX computation itself: MLX starts its threads with the first one, and a fork must not copy a process
with threads. `fork_helpers` talks to it.
"""

import contextlib
import gc
import os
import pickle
import select
import signal
import socket
import struct
import sys
from pathlib import Path

LENGTH = struct.Struct("!q")
STANDARD = (
    3  # file descriptors: input, output, errors; the fourth one sent is where the status goes
)


def n_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def serve(control: socket.socket) -> dict | None:
    """Fork until the other end of `control` closes. Returns in each child, with what it is to run."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the tests' terminal is not for us
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            report_finished(running)
        if control not in ready:
            continue
        head, fds, _, _ = socket.recv_fds(control, LENGTH.size, STANDARD + 1)
        if not head:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            return None
        request = pickle.loads(receive(control, *LENGTH.unpack(head)))
        request["threads"] = n_threads()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for status in running.values():
                status.close()
            for fd in (woken, wake, fds[STANDARD]):
                os.close(fd)
            control.close()
            take_over(request, fds[:STANDARD])
            return request
        running[pid] = socket.socket(fileno=fds[STANDARD])
        running[pid].sendall(LENGTH.pack(pid) + LENGTH.pack(request["threads"]))
        for fd in fds[:STANDARD]:
            os.close(fd)


def report_finished(running: dict[int, socket.socket]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with running.pop(pid) as asked, contextlib.suppress(BrokenPipeError):  # nobody waits for it
            asked.sendall(LENGTH.pack(status))


def receive(control: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        parts.append(control.recv(length))
        assert parts[-1], "the other end closed in the middle of a request"
        length -= len(parts[-1])
    return b"".join(parts)


def take_over(request: dict, fds: list[int]) -> None:
    """Become the process that was asked for: its signals, folder, environment, arguments and streams."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for standard, fd in enumerate(fds):
        os.dup2(fd, standard)
    for fd in fds:
        os.close(fd)
    if request["start_new_session"]:
        start_session()
    os.chdir(request["cwd"])
    os.environb.clear()
    os.environb.update(request["env"])
    for stream in (sys.stdin, sys.stdout):
        stream.reconfigure(line_buffering=stream.isatty())


def start_session() -> None:
    """Lead a session of its own, on the terminal that standard input is, if it is one."""
    import fcntl
    import termios

    os.setsid()
    if os.isatty(0):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def main() -> None:
    import runpy

    sys.path[:1] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    import mlx_lm
    import prompt_toolkit
    import transformers

    import mlx_snapkv.api
    import mlx_snapkv.bench.speed
    import mlx_snapkv.cli.app
    import mlx_snapkv.evals.answering

    del mlx_lm, prompt_toolkit, transformers, mlx_snapkv
    gc.collect()
    gc.freeze()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request is None:
        return
    option, what, *arguments = request["arguments"]
    sys.argv = [option, *arguments]
    if option == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    main()
