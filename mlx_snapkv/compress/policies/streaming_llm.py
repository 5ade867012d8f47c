"""StreamingLLM: keep the first entries and the most recent ones."""

from dataclasses import dataclass

import mlx.core as mx

from ...entries.entries import Entries
from ...entries.quota import Quota
from ...hyperparameters import amount
from ..policy import Policy


@dataclass(frozen=True, kw_only=True)
class StreamingLLM(Policy):
    """Keep the first `n_sink` entries and as many recent ones as the budget allows (section 3.2).

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

    def window_size(self, budget: int) -> int:
        """Return `budget` minus the sink, or half of `budget` if the sink would leave no room."""
        n_sink = self.n_sink if self.n_sink < budget else budget // 2
        return budget - n_sink

    def quota(self, n_prompt: int) -> Quota:
        """Return each full-attention layer's quota, made up of just the sink and the window."""
        n_entries = amount(self.budget, n_prompt)
        self._require_usable_budget(n_entries)
        n_window = self.window_size(n_entries)
        return Quota(entries=n_entries, n_sink=n_entries - n_window, n_window=n_window)

    def score(self, entries: Entries) -> mx.array:
        """Return the positions as scores, `(B, n_kv_heads, T)` float32."""
        B, H, T, _ = entries.keys.shape
        return mx.broadcast_to(mx.arange(T, dtype=mx.float32), (B, H, T))
