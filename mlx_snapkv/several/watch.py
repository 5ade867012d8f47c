"""What ranks tell each other that can't wait: that one has failed, or is gone.

MLX's collectives wait for all ranks, and a rank that has failed in the middle of the model never comes. So every rank
has one connection to rank 0 besides, for sentences and signs of life; nothing of the model goes there.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from ..errors import SnapKVError, sentence

GRACE = 4.0  # seconds that a rank gets to come out of what another one has failed in
FAREWELL = 10.0  # the same when another one has come to its end
BEAT = 5.0  # seconds between signs of life
SILENCE = 30.0  # without one, after which a rank counts as gone

LOST = "connection to a peer was lost"  # what MLX's ring says of a rank whose process has ended


class Watch:
    """This rank's ear for the others.

    Args:
        rank: this one.
        links: by rank, the connections that it has: rank 0 to all others, the others to rank 0.
    """

    def __init__(self, rank: int, links: dict[int, socket.socket]):
        self._rank = rank
        self._links = links
        self._gone: str | None = None  # what was said of a rank that has left
        # By number of a section, what was said of a rank that failed in it.
        self._failed: dict[int, str] = {}
        self._open: set[int] = set()
        self._numbers = itertools.count(1)
        self._left: set[int] = set()
        self._calls = threading.Semaphore(0)
        self._lock = threading.Lock()
        for other, link in links.items():
            self._begin(self._listen, other, link)
        if links:
            self._begin(self._beat)
            atexit.register(self._leave)

    @contextlib.contextmanager
    def section(self) -> Iterator[None]:
        """A block that all ranks go through; see `Ranks.together`."""
        number = next(self._numbers)
        self._open.add(number)
        try:
            self.require_all_here(number)
            yield
        except GeneratorExit:
            raise
        except BaseException as error:
            said = self._said(number, error)
            if said is not None:
                raise SnapKVError(said) from error
            self.tell(sentence(error), number)
            raise
        finally:
            self._open.discard(number)

    def require_all_here(self, number: int = 0) -> None:
        """Raises: SnapKVError: a rank has gone, or has failed in the section of this number."""
        said = self._gone or self._failed.get(number)
        if said is not None:
            raise SnapKVError(said)

    def call(self) -> None:
        """Let the others know that there is something to do."""
        self._send({"rank": self._rank, "call": True})

    def await_call(self) -> None:
        """Wait for a call, without the work that waiting for a collective is; SnapKVError if a rank has gone."""
        while self._links and not self._calls.acquire(timeout=1):
            self.require_all_here()

    def tell(self, why: str | None, number: int = 0) -> None:
        """Let the others know that this rank has failed in a section, or is leaving; None is without a failure."""
        self._send({"rank": self._rank, "why": why, "section": number})

    def _said(self, number: int, error: BaseException) -> str | None:
        """What was said of another rank, if that is why there is an error here, which then is MLX's."""
        if not isinstance(error, RuntimeError):
            return None
        lost = LOST in str(error)
        until = time.monotonic() + (2.0 if lost else 0.2)
        while time.monotonic() < until:
            if self._gone or number in self._failed:
                return self._failed.get(number) or self._gone
            time.sleep(0.02)
        return "another rank has ended without a word: see its own output" if lost else None

    def _begin(self, work, *args: Any) -> None:
        threading.Thread(target=work, args=args, daemon=True).start()

    def _listen(self, other: int, link: socket.socket) -> None:
        link.settimeout(SILENCE)
        why = "has ended without a word"
        try:
            for line in link.makefile("r"):
                self._heard(json.loads(line))
        except TimeoutError:
            why = f"has given no sign of life for {SILENCE:.0f} s"
        except (OSError, ValueError):
            pass
        if other not in self._left:
            self._heard({"rank": other, "why": why, "section": 0})

    def _heard(self, message: dict[str, Any]) -> None:
        if "call" in message:
            self._calls.release()
        if "why" not in message:  # a sign of life
            return
        rank, why, number = message["rank"], message["why"], message["section"]
        if self._rank == 0:
            self._send(message, but=rank)
        if why is None:
            seconds, said = FAREWELL, f"rank {rank} has come to its end, and this one goes on"
        else:
            seconds, said = GRACE, f"rank {rank}: {why}"
        if number:
            self._failed[number] = said
        else:
            self._left.add(rank)
            self._gone = self._gone or said
        about = {number} if number else set(self._open)
        self._begin(self._see_out, seconds, about, said)

    def _see_out(self, seconds: float, about: set[int], said: str) -> None:
        """Give this rank some time to come out of the sections `about`; then end it, for it waits for ever."""
        time.sleep(seconds)
        if about & self._open:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            os.write(2, f"mlx-snapkv: {said}\n".encode())
            os._exit(1)

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT)
            self._send({"rank": self._rank})

    def _send(self, message: dict[str, Any], but: int | None = None) -> None:
        data = json.dumps(message).encode() + b"\n"
        with self._lock:
            for other, link in self._links.items():
                if other != but:
                    with contextlib.suppress(OSError):
                        link.sendall(data)

    def _leave(self) -> None:
        """Say farewell, or what has ended the interpreter."""
        error = getattr(sys, "last_value", None)
        self.tell(None if error is None else sentence(error))
