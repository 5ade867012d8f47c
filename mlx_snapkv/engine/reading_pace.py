"""Decide whether a chunk of a prompt reads all entries or chooses few: whichever takes less time on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from ..planning.request_plan import Plan
from ..planning.speed_record import READ_ALL, READ_FEW, Measurement, Speed
from ..sparse.options import CHUNK_SIZE
from .pace import WORTH

DOUBLED = 2  # factor by which the text has to grow until chunks that choose are tried again

# Ways, as in `ReadingPace.begin`, whose first chunk was read in this process: it also compiles, and is not measured.
compiled: set[bool] = set()


class _Chunk(NamedTuple):
    """A chunk that is being read: when it began, its first position and tokens, and whether it chooses."""

    began: float
    start: int
    n: int
    chooses: bool


class ReadingPace:
    """Decides chunk by chunk whether a prompt is read sparsely, by the seconds that a token took either way.

    The first chunks read everything anyway, and are measured. Then one chunk chooses. If its tokens took clearly less,
    the other chunks choose, too. If not, they read everything, and another chunk chooses when the text has doubled.
    A later token that reads everything takes no less than an earlier one, so the latest one is a lower bound.

    Args:
        plan: with `sparse_reading`; unless it adapts, all chunks choose.
        recorded: what the speed record says. A turn of a conversation follows it until it has measured a chunk.
        clock: returns seconds.

    Attributes:
        measurements: the tokens that were measured, for the speed record.
    """

    def __init__(
        self,
        plan: Plan,
        recorded: Speed,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Start before the first chunk."""
        assert plan.sparse_reading is not None
        self.measurements: list[Measurement] = []
        self._adapts = plan.adapts
        self._n_prompt = plan.n_prompt
        self._last_from = plan.sparse_reading.last_from
        self._clock = clock
        self._chunk: _Chunk | None = None
        # The seconds of a token in the latest chunk that read everything.
        self._dense: float | None = None
        # Whether choosing was faster.
        self._wins = plan.n_held > 0 and bool(recorded.pays(READ_FEW, READ_ALL, plan.n_held, WORTH))
        self._try_from = 0  # position of the next chunk that is tried

    def chooses(self, start: int) -> bool:
        """Return whether a chunk from a position on chooses, if there are more entries than it would choose.

        A model that reads a chunk in several pieces reads all of them alike.
        """
        if not self._adapts:
            return True
        chunk = self._chunk
        if chunk is not None and start < chunk.start + chunk.n:
            return chunk.chooses
        if start >= self._n_prompt:  # the answer's first tokens
            return False
        has_room = start + CHUNK_SIZE <= self._last_from
        is_trial = self._dense is not None and has_room and start >= self._try_from
        return self._wins or is_trial

    def begin(self, start: int, n: int, chooses: bool) -> None:
        """Note that `n` tokens from a position on are read from now on, and whether they choose."""
        self._chunk = _Chunk(self._clock(), start, n, chooses)

    def end(self) -> None:
        """Measure the chunk that has been read since `begin`, if there is one."""
        chunk, self._chunk = self._chunk, None
        if chunk is None or not self._adapts or chunk.n < CHUNK_SIZE:
            return
        if chunk.chooses not in compiled:
            compiled.add(chunk.chooses)
            return
        seconds = (self._clock() - chunk.began) / chunk.n
        kind = READ_FEW if chunk.chooses else READ_ALL
        self.measurements.append(Measurement(kind, chunk.start + chunk.n / 2, seconds))
        if not chunk.chooses:
            self._dense = seconds
        elif self._dense is not None and not self._wins:
            self._wins = seconds < WORTH * self._dense
            self._try_from = DOUBLED * chunk.start
