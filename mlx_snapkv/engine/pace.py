"""Decide which is faster on this machine: tokens of an answer that read all entries, or few."""

from collections import deque
from statistics import median

from ..planning.speed_record import DECODE_ALL, DECODE_FEW, Measurement
from ..sparse.options import FIRST_TOKENS

# Intervals to ignore after a switch: a token already under way, and one that allocates buffers.
N_SKIPPED = 2
N_MEASURED = 6  # number of intervals whose median is the time of a token
MAX_TIME_RATIO = 0.97  # sparse tokens must take at most this fraction of the full cache's time
# The slower way is tried again when the text has grown by `RETRY_GROWTH`. If the slower way takes at most `RETRY_RATIO`
# times as long, it is tried again after `FIRST_GAP` tokens, and then after intervals that double.
RETRY_RATIO = 1.25
FIRST_GAP = 256
RETRY_GROWTH = 1.5


class Pace:
    """Decides whether the next tokens of an answer read all entries or few, by the times of earlier tokens.

    A few tokens are decoded either way, one shortly after the other, and their times compared. No entry is ever
    evicted, so the answer can switch at any token.

    Args:
        n_prompt: tokens of the prompt.
        setup_in_tokens: number of tokens after which reading few entries would have repaid the index and the means.
            This many tokens read all entries before few are tried. An answer that is already long is likely to
            continue, so an answer of unknown length takes at most twice the time of the better choice.

    Attributes:
        reads_all: whether the next tokens read all entries.
        seconds: the latest time per token for each value of `reads_all` that was measured.
    """

    def __init__(self, n_prompt: int, setup_in_tokens: float = 0):
        """Begin an answer, whose first tokens read all entries."""
        self.reads_all = True
        self.seconds: dict[bool, float] = {}
        self._n_text = n_prompt
        self._lengths: dict[bool, int] = {}  # tokens of the text when `seconds` were measured
        # Number of tokens before the other way is tried.
        self._until_trial = max(FIRST_TOKENS, int(min(setup_in_tokens, self._tokens_to_grow())))
        self._gap = FIRST_GAP
        self._is_trial = False
        self._latest: deque[float] = deque(maxlen=N_MEASURED)
        self._to_skip = N_SKIPPED

    @property
    def prefers_all(self) -> bool:
        """Return whether reading all entries was faster in the latest comparison."""
        few, all_entries = self.seconds.get(False), self.seconds.get(True)
        return few is not None and all_entries is not None and few >= MAX_TIME_RATIO * all_entries

    @property
    def measurements(self) -> list[Measurement]:
        """Return the latest time of each way, for the speed record."""
        return [
            Measurement(DECODE_ALL if reads_all else DECODE_FEW, self._lengths[reads_all], seconds)
            for reads_all, seconds in self.seconds.items()
        ]

    def switches(self, seconds: float) -> bool:
        """Count a token that took `seconds`, and return whether the next tokens switch to the other way."""
        self._measure(seconds)
        changes = self._ends_trial() if self._is_trial else self._begins_trial()
        if changes:
            self.reads_all = not self.reads_all
            self._latest.clear()
            self._to_skip = N_SKIPPED
        return changes

    def _measure(self, seconds: float) -> None:
        """Count a token, and update the time per token when enough tokens have followed the latest switch."""
        self._n_text += 1
        self._until_trial -= 1
        if self._to_skip:
            self._to_skip -= 1
            return
        self._latest.append(seconds)
        if self._is_measured:
            self.seconds[self.reads_all] = median(self._latest)
            self._lengths[self.reads_all] = self._n_text

    @property
    def _is_measured(self) -> bool:
        """Return whether enough tokens have followed the latest switch."""
        return len(self._latest) == N_MEASURED

    def _begins_trial(self) -> bool:
        """Start a trial of the other way if it is due, and return whether it starts."""
        self._is_trial = self._until_trial <= 0 and self._is_measured
        return self._is_trial

    def _ends_trial(self) -> bool:
        """End a trial once it has been measured, and return whether the answer should switch back."""
        if not self._is_measured:
            return False
        self._is_trial = False
        self._plan_next_trial()
        return self.prefers_all != self.reads_all

    def _tokens_to_grow(self) -> int:
        """Return the number of tokens after which the other way is tried in any case."""
        return int(self._n_text * (RETRY_GROWTH - 1))

    def _plan_next_trial(self) -> None:
        """Set the number of tokens before the next trial."""
        self._until_trial = self._tokens_to_grow()
        slower, faster = max(self.seconds.values()), min(self.seconds.values())
        if slower <= RETRY_RATIO * faster:
            self._until_trial = min(self._until_trial, self._gap)
            self._gap *= 2
