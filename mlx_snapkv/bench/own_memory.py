"""The process's own memory: what it took from the system, without the files that the system holds for it."""

import contextlib
import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

STATUS = Path("/proc/self/status")
EVERY = 0.05  # seconds


class OwnMemory:
    """The most bytes seen while `watched()` is running.

    On Linux that is anonymous memory, looked up now and then. Elsewhere it is what the system counts, the most since
    the process began, and file pages may be part of it.
    """

    def __init__(self) -> None:
        self.most = 0
        self._done = threading.Event()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        watcher = threading.Thread(target=self._watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            self._done.set()
            watcher.join()
            self._look()

    def _watch(self) -> None:
        while not self._done.wait(EVERY):
            self._look()

    def _look(self) -> None:
        self.most = max(self.most, own_memory())


def own_memory() -> int:
    """Bytes now, or where the system does not tell, the most so far."""
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
