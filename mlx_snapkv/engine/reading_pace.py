"""Chooses between sparse and full attention during prefill, depending on which is faster on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from ..planning.request_plan import Plan
from ..planning.speed_record import READ_FULL, READ_SPARSE, Measurement, Speed
from ..sparse.options import CHUNK_SIZE
from .pace import MAX_TIME_RATIO

RETRY_GROWTH = 2  # the text must grow by this factor before a sparse chunk is tried again

# Kinds of chunks that this process has already read, as values of `_Chunk.chooses`. The first chunk of each kind is not
# measured, because its time includes compilation.
compiled_kinds: set[bool] = set()


class _Chunk(NamedTuple):
    """A chunk that is being read."""

    start_time: float
    start: int  # position of the first token
    n_tokens: int
    chooses: bool


class ReadingPace:
    """Decides whether a prompt chunk chooses entries or reads all of them, whichever is faster.

    The first chunks read all entries and are timed. Then, as a trial, a chunk chooses its entries. If it takes clearly
    less time per token than the latest chunk that read all entries, all following chunks choose theirs too, because
    full attention would only become slower as the text grows. If not, the following chunks read all entries, and
    choosing is tried again once the text is twice as long.

    Args:
        plan: a plan with `sparse_reading`. If the plan does not adapt, all chunks choose their entries.
        recorded_speed: this machine's speed record. If it says that choosing entries is faster at the length of the
            earlier turns, all chunks choose their entries. A first turn gets an empty record: its first chunks have to
            read all entries anyway, so they are timed instead.
        clock: returns the current time in seconds.

    Attributes:
        measurements: chunk times, for the speed record.
    """

    def __init__(
        self,
        plan: Plan,
        recorded_speed: Speed,
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
        self._full_seconds: float | None = None
        # Whether choosing entries is known to be faster.
        self._is_sparse_faster = bool(
            recorded_speed.is_sparse_faster(READ_SPARSE, READ_FULL, plan.n_earlier, MAX_TIME_RATIO)
        )
        self._next_trial_from = 0  # earliest position for the next trial

    def chooses(self, start: int) -> bool:
        """Return whether the chunk at position `start` may choose its entries.

        If there are too few to choose from, the chunk reads all of them anyway.
        """
        if not self._adapts:
            return True
        chunk = self._chunk
        if chunk is not None and start < chunk.start + chunk.n_tokens:
            return chunk.chooses  # all pieces of a chunk do the same
        if start >= self._n_prompt:  # the first answer tokens
            return False
        return self._is_sparse_faster or self._is_trial(start)

    def _is_trial(self, start: int) -> bool:
        """Return whether the chunk that starts at position `start` is a trial, to see if choosing entries is faster."""
        is_whole_chunk = start + CHUNK_SIZE <= self._last_from
        return self._full_seconds is not None and is_whole_chunk and start >= self._next_trial_from

    def begin(self, start: int, n_tokens: int, chooses: bool) -> None:
        """Start timing a chunk of `n_tokens` tokens that starts at position `start`."""
        self._chunk = _Chunk(self._clock(), start, n_tokens, chooses)

    def end(self) -> None:
        """Stop timing the current chunk, if there is one.

        If the plan adapts, record the chunk's time, unless the chunk is short or the first one of its kind.
        """
        chunk, self._chunk = self._chunk, None
        if chunk is None or not self._adapts or chunk.n_tokens < CHUNK_SIZE:
            return
        if chunk.chooses not in compiled_kinds:
            compiled_kinds.add(chunk.chooses)
            return  # the time includes compilation
        token_seconds = (self._clock() - chunk.start_time) / chunk.n_tokens
        kind = READ_SPARSE if chunk.chooses else READ_FULL
        mean_length = chunk.start + chunk.n_tokens / 2
        self.measurements.append(Measurement(kind, mean_length, token_seconds))
        if not chunk.chooses:
            self._full_seconds = token_seconds
        elif self._full_seconds is not None and not self._is_sparse_faster:  # the end of a trial
            self._is_sparse_faster = token_seconds < MAX_TIME_RATIO * self._full_seconds
            self._next_trial_from = RETRY_GROWTH * chunk.start
