"""How many requests are open, from the event loop's thread and the engine's."""

from __future__ import annotations

import threading

from .failures import busy
from .metrics import Metrics
from .requests import Limits


class OpenRequests:
    """Counts the requests that wait or are answered, and lets no more wait than may."""

    def __init__(self, limits: Limits, metrics: Metrics):
        self._limits, self._metrics = limits, metrics
        self._lock = threading.Lock()
        self._n = 0

    def enter(self) -> None:
        """Count a request that has come; ApiError if too many wait."""
        with self._lock:
            waiting = self._n - self._limits.concurrency
            if waiting >= self._limits.queue:
                raise busy(max(0, waiting))
            self._n += 1
        self._metrics.opened()

    def leave(self) -> None:
        """Count it no more: it has been answered, or has failed."""
        with self._lock:
            self._n -= 1
        self._metrics.closed()
