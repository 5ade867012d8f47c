"""One connection from every rank to rank 0, beside MLX's own: heartbeats, and why a rank has ended.

MLX's collectives wait for all ranks, so a rank that fails in the middle of the model would leave the others waiting.
"""

import atexit
import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from typing import Any

from ..errors import SnapKVError, sentence

JOINING = 15.0  # seconds to wait for all ranks
GRACE = 4.0  # seconds in which a rank may end by itself after another has failed
INTERVAL = 5.0  # seconds between heartbeats
SILENCE = 30.0  # seconds without one after which a rank counts as gone

LOST = "connection to a peer was lost"  # what MLX's ring raises when a rank's process has ended


class Heartbeat:
    """Ends this process soon after another rank has failed, with that rank's message.

    `links` are this rank's connections by rank: rank 0's to all others, or the one to rank 0.
    """

    def __init__(self, rank: int, links: dict[int, socket.socket]):
        self._rank = rank
        self._links = links
        self._failed: str | None = None  # the first failing rank's message
        self._has_failed = threading.Event()
        self._left: set[int] = set()
        self._calls = threading.Semaphore(0)
        self._lock = threading.Lock()
        for other, link in links.items():
            self._start(self._listen, other, link)
        if links:
            self._start(self._beat)
            atexit.register(self._at_exit)

    def call(self) -> None:
        """Wake the ranks that wait in `await_call`."""
        self._send({"rank": self._rank, "call": True})

    def await_call(self) -> None:
        """Wait for a call, without the processor time of MLX's collectives. Raises: SnapKVError: a rank has ended."""
        while self._links and not self._calls.acquire(timeout=1):
            if self._left:
                raise SnapKVError(f"rank {min(self._left)} has ended")

    def leave(self, why: str | None) -> str | None:
        """Tell the others that this rank ends, and why, if it failed; the message of the rank that failed before it."""
        if why is not None:
            self._has_failed.wait(2.0 if LOST in why else 0.2)
        failed, self._failed = self._failed, None
        self._send({"rank": self._rank, "why": failed or why})
        return failed

    def _start(self, work: Any, *args: Any) -> None:
        threading.Thread(target=work, args=args, daemon=True).start()

    def _listen(self, other: int, link: socket.socket) -> None:
        """Take what another rank says until its link ends; if it has not said before that it leaves, it has failed."""
        link.settimeout(SILENCE)
        why = "ended unexpectedly"
        try:
            for line in link.makefile("r"):
                self._receive(json.loads(line))
        except TimeoutError:
            why = f"sent no heartbeat for {SILENCE:.0f} s"
        except (OSError, ValueError):
            pass
        if other not in self._left:
            self._receive({"rank": other, "why": why})

    def _receive(self, message: dict[str, Any]) -> None:
        if "call" in message:
            self._calls.release()
        if "why" not in message:  # a heartbeat
            return
        rank, why = message["rank"], message["why"]
        self._left.add(rank)
        if self._rank == 0:
            self._send(message, but=rank)
        if why is not None and self._failed is None:
            self._failed = why if why.startswith("rank ") else f"rank {rank}: {why}"
            self._has_failed.set()
            self._start(self._end, self._failed)

    def _end(self, failed: str) -> None:
        """End this process if it does not end by itself: it may be waiting for the failed rank."""
        time.sleep(GRACE)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os.write(2, f"mlx-snapkv: {failed}\n".encode())
        os._exit(1)

    def _beat(self) -> None:
        while True:
            time.sleep(INTERVAL)
            self._send({"rank": self._rank})

    def _send(self, message: dict[str, Any], but: int | None = None) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            for other, link in self._links.items():
                if other != but:
                    with contextlib.suppress(OSError):
                        link.sendall(data)

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        failed = self.leave(None if error is None else sentence(error))
        if failed is not None:
            print(f"mlx-snapkv: {failed}", file=sys.stderr)


def connected(ranks: Any) -> dict[int, socket.socket]:
    """This rank's connections; none if some rank can't reach rank 0, which warns then. All ranks must call it."""
    token = ranks.first(secrets.token_hex(16))
    try:
        listener = ranks.agreed(lambda: None if ranks.rank else socket.create_server(("", 0)))
        port, addresses = ranks.first((listener and listener.getsockname()[1], _addresses()))
        if listener is not None:
            return ranks.agreed(lambda: _accepted(listener, token, ranks.size - 1))
        greeting = f"{token} {ranks.rank}\n".encode()
        return ranks.agreed(lambda: {0: _reached(addresses, port, greeting)})
    except (OSError, SnapKVError) as error:
        if ranks.rank == 0:
            why = f"no connection for heartbeats ({error}): if one fails, others may wait for it"
            print(f"mlx-snapkv: the ranks have {why}", file=sys.stderr)
        return {}


def _addresses() -> list[str]:
    """Addresses of rank 0: those given to mlx.launch, and the machine's name."""
    found = []
    with (
        contextlib.suppress(OSError, ValueError, LookupError),
        open(os.environ["MLX_HOSTFILE"]) as file,
    ):
        found += [address.rpartition(":")[0] for address in json.load(file)[0]]
    found.append(os.environ.get("MLX_JACCL_COORDINATOR", "").rpartition(":")[0])
    return list(dict.fromkeys([*filter(None, found), socket.gethostname()]))


def _reached(addresses: list[str], port: int, greeting: bytes) -> socket.socket:
    for address in addresses:
        with contextlib.suppress(OSError):
            link = socket.create_connection((address, port), timeout=JOINING / len(addresses))
            link.sendall(greeting)
            return link
    raise OSError(f"rank 0 does not answer at {', '.join(addresses)}")


def _accepted(listener: socket.socket, token: str, n: int) -> dict[int, socket.socket]:
    links: dict[int, socket.socket] = {}
    until = time.monotonic() + JOINING
    with listener:
        while len(links) < n:
            listener.settimeout(max(0.01, until - time.monotonic()))
            link, _ = listener.accept()
            link.settimeout(JOINING)
            greeting = link.recv(100).decode(errors="replace").split()
            if len(greeting) == 2 and secrets.compare_digest(greeting[0], token):
                links[int(greeting[1])] = link
            else:
                link.close()
    return links
