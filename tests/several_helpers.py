"""Several processes on this machine that hold one model, under a limit of time that they can't outlast."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

LIMIT = 120  # seconds
ROOT = Path(__file__).parents[1]


def started(folder: Path, *command: str, n: int = 2, limit: float = LIMIT) -> list[tuple[int, str]]:
    """Run `python command` as the ranks of a ring, as mlx.launch does: by rank, the exit code and all that was printed.

    Args:
        folder: for the ring's file.
        limit: seconds after which whoever is left is killed, which is an error.
    """
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(n)]))
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    same = os.environ | {"MLX_HOSTFILE": str(hosts), "PYTHONPATH": path}
    said = [(folder / f"said-{rank}.txt").open("w+b") for rank in range(n)]
    ranks = [
        subprocess.Popen(
            [sys.executable, *command],
            env=same | {"MLX_RANK": str(rank)},
            stdin=subprocess.DEVNULL,
            stdout=said[rank],
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        for rank in range(n)
    ]
    end = time.monotonic() + limit
    try:
        codes = [process.wait(max(0.1, end - time.monotonic())) for process in ranks]
    finally:
        for process in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return [(code, _text(file)) for code, file in zip(codes, said)]


def _text(file) -> str:
    with file:
        file.seek(0)
        return file.read().decode(errors="replace")


def free_ports(n: int) -> list[int]:
    with contextlib.ExitStack() as opened:
        sockets = [opened.enter_context(socket.socket()) for _ in range(n)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
