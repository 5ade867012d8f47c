"""Figures that are computed beside what comes next."""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .results import Record

STREAMS = 2  # of a CPU: each computes on a core of its own
WAITING = 32  # records under way there, each of which holds a compressed cache


class Beside:
    """Records that hold arrays, which a CPU computes while the next text is read.

    On a GPU, which is busy with one at a time, the next record waits for the one before.

    Args:
        add: receives every record when its arrays are numbers, in order.
    """

    def __init__(self, add: Callable[[Record], None]):
        self._add, self._waiting = add, deque[Callable[[], None]]()
        device = mx.default_device()
        beside = device.type == mx.cpu
        streams = _cpu_streams() if beside else [mx.default_stream(device)]
        self._streams, self._most = itertools.cycle(streams), WAITING if beside else 0

    def next_stream(self) -> Any:
        """Where the arrays of the next record are to be computed."""
        return next(self._streams)

    def add(self, record: Record) -> None:
        mx.async_eval([x for x in record.values() if isinstance(x, mx.array)])
        self.then(lambda: self._add(_numbers(record)))

    def then(self, call: Callable[[], None]) -> None:
        """Call this when the records so far are done."""
        self._waiting.append(call)
        while len(self._waiting) > self._most:
            self._waiting.popleft()()

    def finish(self) -> None:
        while self._waiting:
            self._waiting.popleft()()


@functools.cache
def _cpu_streams() -> list[Any]:
    """Each has a thread, as long as the process runs."""
    return [mx.new_stream(mx.cpu) for _ in range(STREAMS)]


def _numbers(record: Record) -> Record:
    return {name: x.item() if isinstance(x, mx.array) else x for name, x in record.items()}
