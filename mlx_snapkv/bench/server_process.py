"""A server in a process of its own, watched (`served.py`)."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

import httpx

from ..errors import SnapKVError

WAIT = 600.0  # seconds until it answers its first request
GRACE = 10.0  # seconds to end in


class ServerProcess:
    """A server that runs.

    Attributes:
        name: what errors call it.
        url: where it listens.
    """

    def __init__(self, name: str, process: subprocess.Popen[str], log: IO[bytes], url: str):
        self._process, self._log = process, log
        self.name, self.url = name, url

    def figures(self) -> dict[str, Any]:
        """What it holds (`served.Figures`), and its peaks; of steps, those since this was last asked.

        Raises:
            SnapKVError: it runs no more.
        """
        assert self._process.stdin and self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("{"):
                found = json.loads(line)
                return found | {"kv_bytes": {int(n): b for n, b in found["kv_bytes"].items()}}
        raise self.ended()

    def ended(self) -> SnapKVError:
        """What is told of a server that has ended by itself: the last that it has said."""
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip().splitlines() or ["nothing"]
        return SnapKVError(f"{self.name} has ended, saying: {said[-1]}")

    def wait(self) -> None:
        """Wait until requests can be sent; SnapKVError if that never comes."""
        until = time.monotonic() + WAIT
        while time.monotonic() < until:
            if self._process.poll() is not None:
                raise self.ended()
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            time.sleep(0.1)
        raise SnapKVError(f"{self.name} took no requests for {WAIT:.0f} s")


@contextlib.contextmanager
def running(command: Sequence[str]) -> Iterator[ServerProcess]:
    """A server while the block runs.

    Args:
        command: the module and its arguments; its address is added.
    """
    port = _free_port()
    module = [sys.executable, "-m", "mlx_snapkv.bench.served"]
    place = ["--host", "127.0.0.1", "--port", str(port)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    name = " ".join(command[:2])
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*module, *command, *place], stderr=log, **pipes)  # type: ignore[call-overload]
        try:
            server = ServerProcess(name, process, log, f"http://127.0.0.1:{port}")
            server.wait()
            yield server
        finally:
            process.terminate()
            try:
                process.communicate(timeout=GRACE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]
