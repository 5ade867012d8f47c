"""Run several processes that share one model on this machine, under a time limit."""

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fork_helpers

LIMIT = 120  # seconds
ROOT = Path(__file__).parents[1]


def started(folder: Path, *command: str, limit=LIMIT, lines="") -> list[tuple[int, str]]:
    """Run `python -m command` as two ranks of a ring, as mlx.launch does. Return (exit code, output) of each rank.

    Both get `lines` as standard input. A rank that still runs after `limit` seconds is killed, which is an error.
    """
    with running(folder, *command, lines=lines) as ranks:
        end = time.monotonic() + limit
        for rank in ranks:
            rank.process.wait(max(0.1, end - time.monotonic()))
        return [(rank.process.returncode, rank.said) for rank in ranks]


class Rank:
    """A process, and the file with all of its output."""

    def __init__(self, file: Path, command: list[str], **options):
        self._file = file
        with file.open("wb") as said:
            options |= {"stdout": said, "stderr": said, "start_new_session": True}
            self.process = fork_helpers.Popen(command, **options)

    @property
    def said(self) -> str:
        return self._file.read_text(errors="replace")


@contextlib.contextmanager
def running(folder: Path, *command: str, lines: str = "") -> Iterator[list[Rank]]:
    """Yield the ranks of `python -m command`, and kill those still running at the end of the block."""
    typed = folder / "typed.txt"
    typed.write_text(lines)
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    same = os.environ | {"MLX_HOSTFILE": str(hosts), "PYTHONPATH": path}
    ranks = []
    for rank in range(2):
        env, file = same | {"MLX_RANK": str(rank)}, folder / f"said-{rank}.txt"
        with open(typed) as stdin:
            ranks.append(Rank(file, [sys.executable, "-m", *command], env=env, stdin=stdin))
    try:
        yield ranks
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(rank.process.pid, signal.SIGKILL)
            rank.process.wait()


def first_of_free_ports(n: int) -> int:
    """Return a port that is free, with `n - 1` free ports after it."""
    while True:
        (first,) = free_ports(1)
        with contextlib.suppress(OSError, OverflowError), contextlib.ExitStack() as opened:
            for port in range(first, first + n):
                opened.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


def free_ports(n: int) -> list[int]:
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(n)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
