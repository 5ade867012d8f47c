"""StreamingLLM: keep the first entries and the most recent ones."""

from dataclasses import dataclass

import mlx.core as mx

from ...entries.entries import Entries
from ...entries.quota import Quota
from ..policy import Policy


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Policy):
    """Keeps the first `n_sink` entries and as many recent ones as the budget allows (section 3.2).

    Difference from the paper: keys keep their original RoPE rotation. The paper rotates keys by their position in the
    cache, so distances never exceed the trained length.
    """

    name = "streaming_llm"
    summary = "attention sinks and recent entries"
    paper = "Xiao et al. 2023, arXiv:2309.17453"

    n_sink: int = 4
    n_window: int | str = "100%"

    def __post_init__(self):
        """Reject any `n_window` other than the default, because the window is the budget minus the sink."""
        is_default = self.n_window == "100%"
        self._require(
            "n_window", is_default, "left out, since all of the budget except n_sink is recent"
        )
        super().__post_init__()

    def _quota_of(self, n_entries: int) -> Quota:
        """Return the quota for a budget of `n_entries`.

        A sink that leaves no room for a window is cut to half the budget.
        """
        n_sink = self.n_sink if self.n_sink < n_entries else n_entries // 2
        return Quota(n_entries, n_sink, n_window=n_entries - n_sink)

    def score(self, entries: Entries) -> mx.array:
        """Return the entries' indices as scores, `(B, n_kv_heads, T)` float32."""
        B, H, T, _ = entries.keys.shape
        return mx.broadcast_to(mx.arange(T, dtype=mx.float32), (B, H, T))
