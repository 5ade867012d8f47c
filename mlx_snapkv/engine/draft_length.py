"""How many tokens a round of speculative decoding drafts, and when it stops drafting.

If each draft is accepted with probability α, a round of γ drafts yields (1 - α^(γ+1)) / (1 - α) tokens on average
(Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", 2023, arXiv:2211.17192, equation 1). It
takes γ draft steps and one verification pass over γ+1 tokens. Theirs takes as long as one step of the model; ours grows
with γ, by what each further token takes. So of all γ the one is taken with the most tokens a second:

    tokens(γ) / (γ · draft + plain + γ · further),    none: 1 / plain

where α and the seconds are measured as the answer goes on.
"""

from collections import deque

MOST_DRAFTS = 16
AT_FIRST = 8  # tokens of the full cache: an answer of no more is not worth the probes
# Drafts of the first rounds. The very first draft also computes what later ones find ready. To verify several takes
# less than several times one alone; that is not tried where a draft by itself takes `TOO_MUCH` of a token's time.
PROBES = (1, 1, 4)
TOO_MUCH = 0.85
RECENT = 3  # measurements, of which the least counts: what else a machine does only adds to them
PRIOR = 9  # drafts, 8 of them accepted, before there are any
FORGET = 1 / 64  # of the drafts counted, at each further one
MEASURE_EVERY = 64  # tokens between two rounds without drafts while drafting pays
PATIENCE = 4  # tokens of the full cache, which measure it anew, until drafts that would not pay are given up
NEARLY = 0.9  # of the full cache's speed, from which on a last probe comes before that


class DraftLength:
    """Chooses the next round's number of drafts from what the earlier ones took and yielded."""

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=RECENT)
        self._draft: deque[float] = deque(maxlen=RECENT)
        self._further: deque[float] = deque(maxlen=RECENT)
        self._checked, self._accepted = float(PRIOR), PRIOR - 1.0
        self._probes, self._last_probe = list(PROBES), True
        self._n_since_plain = self._n_unpaid = self._n_plain = 0

    @property
    def stopped(self) -> bool:
        """Whether the rest of the answer is the full cache's, without drafts."""
        return self._n_unpaid > PATIENCE

    @property
    def plain(self) -> float:
        """Seconds of a token of the full cache; 0 if none was measured."""
        return min(self._plain, default=0.0)

    def next(self) -> int:
        """Drafts of the next round; 0 is a token of the full cache."""
        if self.stopped or self._n_plain < AT_FIRST:
            return 0
        if len(self._probes) == 1 and min(self._draft) > TOO_MUCH * self.plain:
            self._probes.clear()
        if self._probes:
            return self._probes.pop(0)
        best = max(range(1, MOST_DRAFTS + 1), key=self._speed)
        if self._speed(best) > 1:
            self._n_unpaid = 0
            return 0 if self._n_since_plain >= MEASURE_EVERY else best
        if self._n_unpaid == PATIENCE and self._last_probe and self._speed(best) > NEARLY:
            self._n_unpaid, self._last_probe = 0, False
            return PROBES[-1]
        self._n_unpaid += 1
        return 0

    def took(self, n_drafts: int, draft_seconds: float, pass_seconds: float) -> None:
        """Count the seconds of a round, its drafts and its pass over all entries."""
        if n_drafts == 0:
            self._plain.append(pass_seconds)
            self._n_plain += 1
            self._n_since_plain = 0
            return
        self._n_since_plain += 1 + n_drafts
        self._draft.append(draft_seconds / n_drafts)
        self._further.append(max(0.0, pass_seconds - self.plain) / n_drafts)

    def yielded(self, n_drafts: int, n_accepted: int) -> None:
        """Count a round's accepted drafts; of the others only the first was compared with the full cache's token."""
        for i in range(min(n_drafts, n_accepted + 1)):
            self._checked += 1 - FORGET * self._checked
            self._accepted += (i < n_accepted) - FORGET * self._accepted

    def _speed(self, n_drafts: int) -> float:
        """Of rounds of so many drafts, in times the full cache's."""
        accepted = self._accepted / self._checked
        tokens = sum(accepted**i for i in range(n_drafts + 1))
        step = min(self._draft) + min(self._further)
        return tokens * self.plain / (self.plain + n_drafts * step)
