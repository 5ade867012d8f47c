"""Decide whether the tokens of an answer read all entries or few: whichever takes less time on this machine."""

from collections import deque
from statistics import median

from ..planning.speed_record import DECODE_ALL, DECODE_FEW, Measurement
from ..sparse.options import FIRST_TOKENS

DROPPED = 2  # intervals after a switch: a token that was under way, and one that allocates buffers
MEASURED = 6  # intervals whose median is the time of a token
WORTH = 0.97  # part of the full cache's time that a sparse token may take
CLOSE = 1.25  # ratio of the two times up to which the slower way is tried again
FIRST_GAP = 256  # tokens until the slower way is tried again; doubled at every try
GROWTH = 1.5  # factor by which the text has to grow for another try in any case


class Pace:
    """Decides which entries the next tokens of an answer read, by the seconds that tokens took.

    The two ways are compared by a few tokens of each, one shortly after the other. All entries stay, so any sequence
    of the two is possible.

    Args:
        n_prompt: tokens of the prompt.
        setup_in_tokens: number of tokens after which reading few entries would have repaid the index and the means. Few
            entries are tried after as many tokens that read all, because an answer that is already long is likely to
            go on: so an answer of unknown length takes at most twice the time of the better choice.

    Attributes:
        reads_all: whether the next tokens read all entries.
        seconds: the latest time of a token by `reads_all`; a way that has not been measured is missing.
    """

    def __init__(self, n_prompt: int, setup_in_tokens: float = 0):
        """Start with all entries, before the first token."""
        self.reads_all = True
        self.seconds: dict[bool, float] = {}
        self._n_text = n_prompt
        self._lengths: dict[bool, int] = {}  # tokens of the text when `seconds` were measured
        # Number of tokens until the other way is tried.
        self._until_trial = max(FIRST_TOKENS, int(min(setup_in_tokens, self._tokens_to_grow())))
        self._gap = FIRST_GAP
        self._is_trial = False
        self._latest: deque[float] = deque(maxlen=MEASURED)
        self._to_drop = DROPPED

    @property
    def prefers_all(self) -> bool:
        """Return whether reading all entries was the faster way when both were last compared."""
        few, all_entries = self.seconds.get(False), self.seconds.get(True)
        return few is not None and all_entries is not None and few >= WORTH * all_entries

    @property
    def measurements(self) -> list[Measurement]:
        """Return the latest time of each way that was measured, for the speed record."""
        return [
            Measurement(DECODE_ALL if reads_all else DECODE_FEW, self._lengths[reads_all], seconds)
            for reads_all, seconds in self.seconds.items()
        ]

    def switches(self, seconds: float) -> bool:
        """Count a token that took `seconds`, and return whether the next tokens read the other way."""
        self._measure(seconds)
        changes = self._ends_trial() if self._is_trial else self._begins_trial()
        if changes:
            self.reads_all = not self.reads_all
            self._latest.clear()
            self._to_drop = DROPPED
        return changes

    def _measure(self, seconds: float) -> None:
        """Count a token, and update the time of a token if enough of them followed the latest switch."""
        self._n_text += 1
        self._until_trial -= 1
        if self._to_drop:
            self._to_drop -= 1
            return
        self._latest.append(seconds)
        if self._is_measured:
            self.seconds[self.reads_all] = median(self._latest)
            self._lengths[self.reads_all] = self._n_text

    @property
    def _is_measured(self) -> bool:
        """Return whether enough tokens followed the latest switch."""
        return len(self._latest) == MEASURED

    def _begins_trial(self) -> bool:
        """Return whether the other way is tried from the next token on, and note it."""
        self._is_trial = self._until_trial <= 0 and self._is_measured
        return self._is_trial

    def _ends_trial(self) -> bool:
        """End a trial that is measured, and return whether the way before the trial is the faster one."""
        if not self._is_measured:
            return False
        self._is_trial = False
        self._plan_next_trial()
        return self.prefers_all != self.reads_all

    def _tokens_to_grow(self) -> int:
        """Return after how many tokens the other way is tried in any case."""
        return int(self._n_text * (GROWTH - 1))

    def _plan_next_trial(self) -> None:
        """Set how many tokens to decode before the slower way is tried again."""
        self._until_trial = self._tokens_to_grow()
        slower, faster = max(self.seconds.values()), min(self.seconds.values())
        if slower <= CLOSE * faster:
            self._until_trial = min(self._until_trial, self._gap)
            self._gap *= 2
