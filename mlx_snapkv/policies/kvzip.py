"""KVzip: what the model looks at to repeat a text is what it needs of it."""

from dataclasses import dataclass

import mlx.core as mx

from ..entries.entries import Entries
from .base import Policy


@dataclass(frozen=True, kw_only=True)
class KVzip(Policy):
    """Score entries by the most attention they receive while the model reads the prompt a second time (section 3.2).

    After prefill the model reads the prompt again behind its own entries, 2,048 tokens at a time, each chunk after the
    8 tokens before it, and rolls them back. Each query's weights are a softmax over the first `n_sink` entries, the
    entries of the chunk, and the repetition so far (section 3.4). An entry's score is the maximum over all queries and
    the heads of a GQA group. KVzip needs no question, so it suits texts that are read before their questions are
    known. Reading takes 2 to 5 times as long, and needs memory for one more chunk. Conversations, whose turns choose
    again, and `memory="recall"` refuse it.

    It differs from the paper in two ways. All heads and layers keep equally many entries; the paper ranks the entries
    of all layers together. And no instruction to repeat is read, since a request may have no tokenizer to encode it; a
    subclass can provide one with `lead_in`.

    Attributes:
        n_sink: number of first entries, which are always kept and which every query sees.
        schedule: only "once", since the whole prompt is read before any of it is read again.
    """

    name = "kvzip"
    summary = "the most attention an entry receives while the model reads the prompt again"
    paper = "Kim et al. 2025, arXiv:2505.23416"
    schedules = ("once",)
    repeats = 2048

    n_sink: int = 4
    schedule: str = "once"  # type: ignore[misc]

    def score(self, entries: Entries) -> mx.array:
        """`(B, n_kv_heads, T)` float32: logarithms, base 2, of weights, since many are too small to tell apart."""
        return entries.repeated
