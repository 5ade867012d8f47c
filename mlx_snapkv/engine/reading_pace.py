"""Switches between sparse and full attention during prefill, whichever is faster on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from ..planning.request_plan import Plan
from ..planning.speed_record import READ_ALL, READ_FEW, Measurement, Speed
from ..sparse.options import CHUNK_SIZE
from .pace import MAX_TIME_RATIO

RETRY_GROWTH = 2  # the text must grow by this factor before a sparse chunk is tried again

# Values of `chooses` for which this process has already read a chunk. The first chunk of each kind includes
# compilation, so it is not measured.
compiled: set[bool] = set()


class _Chunk(NamedTuple):
    """A chunk that is being read."""

    began: float
    start: int
    n: int
    chooses: bool


class ReadingPace:
    """Decides from the speed of earlier chunks whether a prompt chunk chooses entries or reads all of them.

    The first chunks read all entries and are timed. Then a single chunk chooses. If it is clearly faster per token, all
    following chunks choose. If not, they read all entries, and sparse reading is tried again once the text is twice as
    long. Full attention slows down as the text grows, so its latest time per token is a lower bound for later chunks.

    Args:
        plan: a plan with `sparse_reading`. Unless it adapts, all chunks choose.
        recorded: the speed record, which a conversation turn relies on until it has measured a chunk itself.
        clock: returns the current time in seconds.

    Attributes:
        measurements: chunk times, for the speed record.
    """

    def __init__(
        self,
        plan: Plan,
        recorded: Speed,
        clock: Callable[[], float] = time.perf_counter,
    ):
        """Start with the first chunk of a prompt."""
        assert plan.sparse_reading is not None
        self.measurements: list[Measurement] = []
        self._adapts = plan.adapts
        self._n_prompt = plan.n_prompt
        self._last_from = plan.sparse_reading.last_from
        self._clock = clock
        self._chunk: _Chunk | None = None
        # Seconds per token in the latest chunk that read all entries.
        self._dense: float | None = None
        # Whether choosing is known to be faster.
        self._wins = plan.n_held > 0 and bool(
            recorded.pays(READ_FEW, READ_ALL, plan.n_held, MAX_TIME_RATIO)
        )
        self._try_from = 0  # position of the first chunk that may be tried next

    def chooses(self, start: int) -> bool:
        """Return whether a chunk that starts at position `start` chooses, if there are enough entries.

        If a chunk is read in pieces, all pieces are treated alike.
        """
        if not self._adapts:
            return True
        chunk = self._chunk
        if chunk is not None and start < chunk.start + chunk.n:
            return chunk.chooses
        if start >= self._n_prompt:  # the first answer tokens
            return False
        has_room = start + CHUNK_SIZE <= self._last_from
        is_trial = self._dense is not None and has_room and start >= self._try_from
        return self._wins or is_trial

    def begin(self, start: int, n: int, chooses: bool) -> None:
        """Start timing a chunk of `n` tokens at position `start`."""
        self._chunk = _Chunk(self._clock(), start, n, chooses)

    def end(self) -> None:
        """Stop timing the current chunk, if there is one, and record its time."""
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
