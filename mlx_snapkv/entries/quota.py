"""The number of entries that a layer keeps or a token reads."""

from __future__ import annotations

from dataclasses import dataclass

UNLIMITED = 2**30  # a number of entries that no prompt reaches


@dataclass(frozen=True)
class Quota:
    """Entries per KV head of each layer: `entries` in all, the first `n_sink` and the newest `n_window` among them."""

    entries: int
    n_sink: int
    n_window: int

    def shrunk(self) -> Quota:
        """Return the same number of entries with sink and window cut to half of it, if both together exceed it.

        They share the half in proportion to their sizes.
        """
        n_always_kept = self.n_sink + self.n_window
        if n_always_kept <= self.entries:
            return self
        half = max(1, self.entries // 2)
        n_window = max(1, half * self.n_window // n_always_kept) if self.n_window else 0
        return Quota(entries=self.entries, n_sink=half - n_window, n_window=n_window)
