"""The number of entries that a layer keeps, or that a token reads."""

from __future__ import annotations

from dataclasses import dataclass

UNLIMITED = 2**30  # larger than any prompt


@dataclass(frozen=True)
class Quota:
    """Number of entries per KV head: `entries` in total, including the first `n_sink` and the newest `n_window`."""

    entries: int
    n_sink: int
    n_window: int

    def shrunk_to_fit(self) -> Quota:
        """Return the quota, with sink and window shrunk if they don't fit in `entries`.

        Together, they then take half of `entries`, in the same proportion as before.
        """
        n_always_kept = self.n_sink + self.n_window
        if n_always_kept <= self.entries:
            return self
        half = max(1, self.entries // 2)
        n_window = max(1, half * self.n_window // n_always_kept) if self.n_window else 0
        return Quota(entries=self.entries, n_sink=half - n_window, n_window=n_window)
