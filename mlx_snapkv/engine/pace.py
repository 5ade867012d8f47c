"""Chooses between sparse and full attention during an answer, depending on which is faster on this machine."""

from collections import deque
from statistics import median

from ..planning.speed_record import DECODE_FULL, DECODE_SPARSE, Measurement
from ..sparse.options import FIRST_TOKENS

# Number of tokens that are not timed after a switch: one is already being computed, and the next allocates buffers.
N_SKIPPED = 2
N_MEASURED = 6  # the time per token is the median over this many tokens
# Sparse attention is preferred only if its time per token is less than this fraction of full attention's.
MAX_TIME_RATIO = 0.97
# The slower mode is retried once the text has grown by a factor of `RETRY_GROWTH`. If it takes at most `RETRY_RATIO`
# times as long as the faster one, it is retried sooner: after `FIRST_GAP` tokens, with the gap doubling each time.
RETRY_RATIO = 1.25
FIRST_GAP = 256
RETRY_GROWTH = 1.5


class Pace:
    """Decides whether the next answer tokens read all entries or only a few, whichever is faster.

    A few tokens are decoded in each mode in quick succession, and their times are compared. Nothing is evicted, so the
    answer can switch modes at any token.

    Args:
        n_prompt: prompt length in tokens.
        tokens_to_repay_setup: number of tokens that must be decoded with sparse attention to make up for building the
            index and the means. Sparse attention is first tried after the same number of tokens with full attention, so
            that an answer of any length takes at most about twice as long as in the faster mode. It is tried sooner if
            the text has grown by a factor of `RETRY_GROWTH`, but never before `FIRST_TOKENS` tokens.

    Attributes:
        reads_all: whether the next tokens read all entries.
        seconds: latest measured seconds per token, keyed by `reads_all`. Modes that have not been measured are omitted.
    """

    def __init__(self, n_prompt: int, tokens_to_repay_setup: float = 0):
        """Start an answer. The first tokens read all entries."""
        self.reads_all = True
        self.seconds: dict[bool, float] = {}
        self._n_tokens = n_prompt
        self._lengths: dict[bool, int] = {}  # text length in tokens when `seconds` was measured
        n_to_repay = int(min(tokens_to_repay_setup, self._max_until_trial()))
        self._n_until_trial = max(FIRST_TOKENS, n_to_repay)  # tokens until the other mode is tried
        self._next_gap = FIRST_GAP
        self._is_trial = False
        self._latest_seconds: deque[float] = deque(maxlen=N_MEASURED)
        self._n_to_skip = N_SKIPPED

    @property
    def prefers_all(self) -> bool:
        """Return whether full attention won the latest comparison.

        It wins unless sparse attention is clearly faster. Return False before the first comparison.
        """
        sparse_seconds, full_seconds = self.seconds.get(False), self.seconds.get(True)
        if sparse_seconds is None or full_seconds is None:
            return False
        return sparse_seconds >= MAX_TIME_RATIO * full_seconds

    @property
    def measurements(self) -> list[Measurement]:
        """Return the latest measurement of each mode, for the speed record."""
        kind_by_reads_all = {True: DECODE_FULL, False: DECODE_SPARSE}
        return [
            Measurement(kind_by_reads_all[reads_all], self._lengths[reads_all], seconds)
            for reads_all, seconds in self.seconds.items()
        ]

    def switches_after(self, seconds: float) -> bool:
        """Record a token that took `seconds`, and return whether to switch modes for the next tokens."""
        self._add_token(seconds)
        switches = self._end_trial_if_measured() if self._is_trial else self._begin_trial_if_due()
        if switches:
            self.reads_all = not self.reads_all
            self._latest_seconds.clear()
            self._n_to_skip = N_SKIPPED
        return switches

    def _add_token(self, seconds: float) -> None:
        """Count a token, and update the time per token if enough tokens have been timed since the last switch."""
        self._n_tokens += 1
        self._n_until_trial -= 1
        if self._n_to_skip > 0:
            self._n_to_skip -= 1
            return
        self._latest_seconds.append(seconds)
        if self._is_measured:
            self.seconds[self.reads_all] = median(self._latest_seconds)
            self._lengths[self.reads_all] = self._n_tokens

    @property
    def _is_measured(self) -> bool:
        """Return whether enough tokens have been timed since the last switch."""
        return len(self._latest_seconds) == N_MEASURED

    def _begin_trial_if_due(self) -> bool:
        """Start a trial of the other mode if one is due. Return whether it started."""
        self._is_trial = self._n_until_trial <= 0 and self._is_measured
        return self._is_trial

    def _end_trial_if_measured(self) -> bool:
        """End a trial once enough tokens have been timed. Return whether to switch back."""
        if not self._is_measured:
            return False
        self._is_trial = False
        self._plan_next_trial()
        return self.prefers_all != self.reads_all  # the mode on trial did not win

    def _max_until_trial(self) -> int:
        """Return the maximum number of tokens until the other mode is tried."""
        return int(self._n_tokens * (RETRY_GROWTH - 1))

    def _plan_next_trial(self) -> None:
        """Schedule the next trial. It comes sooner if the two modes are about equally fast."""
        self._n_until_trial = self._max_until_trial()
        faster_seconds, slower_seconds = min(self.seconds.values()), max(self.seconds.values())
        if slower_seconds <= RETRY_RATIO * faster_seconds:
            self._n_until_trial = min(self._n_until_trial, self._next_gap)
            self._next_gap *= 2
