"""Decide which is faster on this machine: prompt chunks that read all entries, or chunks that choose few."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from ..planning.request_plan import Plan
from ..planning.speed_record import READ_ALL, READ_FEW, Measurement, Speed
from ..sparse.options import CHUNK_SIZE
from .pace import MAX_TIME_RATIO

RETRY_GROWTH = 2  # the text must grow by this factor before choosing is tried again

# Ways (as in `ReadingPace.begin`) whose first chunk this process has read. It includes compilation, so it is not
# measured.
compiled: set[bool] = set()


class _Chunk(NamedTuple):
    """A chunk that is being read."""

    began: float
    start: int
    n: int
    chooses: bool


class ReadingPace:
    """Decides for each chunk of a prompt whether it chooses entries or reads all, by the speed of earlier chunks.

    The first chunks read all entries in any case, and are measured. Then one chunk chooses. If its tokens took clearly
    less time, the following chunks choose, too. Otherwise they read all entries, and another chunk is tried when the
    text has doubled. Reading all entries takes longer the longer the text, so its latest time is a lower bound.

    Args:
        plan: a plan with `sparse_reading`; unless it adapts, all chunks choose.
        recorded: the speed record, which a turn of a conversation follows until it has measured a chunk.
        clock: returns seconds.

    Attributes:
        measurements: times of chunks, for the speed record.
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
        # Seconds per token of the latest chunk that read all entries.
        self._dense: float | None = None
        # Whether choosing was faster.
        self._wins = plan.n_held > 0 and bool(
            recorded.pays(READ_FEW, READ_ALL, plan.n_held, MAX_TIME_RATIO)
        )
        self._try_from = 0  # position of the first chunk that may be tried next

    def chooses(self, start: int) -> bool:
        """Return whether a chunk that starts at `start` chooses, provided that there are enough entries.

        If a model reads a chunk in pieces, all of its pieces are read the same way.
        """
        if not self._adapts:
            return True
        chunk = self._chunk
        if chunk is not None and start < chunk.start + chunk.n:
            return chunk.chooses
        if start >= self._n_prompt:  # first tokens of the answer
            return False
        has_room = start + CHUNK_SIZE <= self._last_from
        is_trial = self._dense is not None and has_room and start >= self._try_from
        return self._wins or is_trial

    def begin(self, start: int, n: int, chooses: bool) -> None:
        """Note that `n` tokens from position `start` are being read, and whether they choose."""
        self._chunk = _Chunk(self._clock(), start, n, chooses)

    def end(self) -> None:
        """Measure the chunk since `begin`, if there is one."""
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
            self._wins = seconds < MAX_TIME_RATIO * self._dense
            self._try_from = RETRY_GROWTH * chunk.start
