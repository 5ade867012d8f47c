"""KVzip: what the model looks at to repeat a text is what it needs of it."""

from dataclasses import dataclass

import mlx.core as mx

from ..entries.entries import Entries
from .base import Policy


@dataclass(frozen=True, kw_only=True)
class KVzip(Policy):
    """The most attention that an entry receives while the model reads the prompt once more (section 3.2).

    When the prompt has been read, it is fed again behind itself, 2,048 tokens at a time, each chunk after the 8 tokens
    before it, and rolled back. Each query's weights are a softmax over the first `n_sink` entries, those of the chunk,
    and the repetition so far (section 3.4); an entry's score is the maximum over all queries and a GQA group's heads.
    It needs no question, so it is for texts that are read before their questions are known. Reading takes 2 to 5
    times as long, and memory for one more chunk. Conversations, whose turns choose again, and `memory="recall"` refuse
    it.

    All heads and layers keep equally many entries; the paper ranks those of all layers together. It also differs in
    that no instruction to repeat is read, since a request may have no tokenizer to encode it: a subclass can give one
    by `lead_in`.

    Attributes:
        n_sink: first entries, always kept, which every query may look at.
        schedule: "once": the whole prompt is read before any of it is read again.
    """

    name = "kvzip"
    summary = "the most attention an entry receives while the model reads the prompt again"
    paper = "Kim et al. 2025, arXiv:2505.23416"
    schedules = ("once",)
    repeats = 2048

    n_sink: int = 4
    schedule: str = "once"

    def score(self, entries: Entries) -> mx.array:
        """`(B, n_kv_heads, T)` float32: logarithms, base 2, of weights, since many are too small to tell apart."""
        return entries.repeated
