"""The cache of an answer whose every token chooses anew which entries it reads."""

from __future__ import annotations

import copy
from operator import attrgetter
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from ..caches.contract import LayerCache, keys_of
from ..entries.entries import Entries
from ..entries.quantization import n_bytes, rows
from ..entries.queries import Captured
from .bias import biased
from .choosing import Choosing
from .gathered import Gathered
from .token_ranking import TokenRanking

# Newest entries that every token reads; when there are more, the older half is ranked with the prompt's entries.
MAX_RECENT = 512


class SparseKVCache(Choosing, LayerCache):
    """Reads, at each token, the entries that its own queries rank highest, and the latest of the answer's.

    A token chooses among the prompt's entries, and among those of the answer that are not `MAX_RECENT` any more: see
    `TokenRanking`.
    """

    is_compressed = True
    keys = keys_of(attrgetter("_gathered"))
    # Of the logits of the first entries that the newest tokens read; see `Rest.bias`.
    bias: mx.array | None = None

    def __init__(self, ranking: TokenRanking):
        self.ranking, self.layer = ranking, ranking.view.layer
        self.offset = n = len(ranking.view)
        self._most_recent = max(MAX_RECENT, ranking.n_window + MAX_RECENT // 2)
        # Every token reads sink, window and the answer's recent entries.
        self._gathered = Gathered()
        if n:
            self._gathered.append(*ranking.always_read())
            self._seen = self._gathered.always()
            mx.eval(self._seen)
        self.n_seen = self.size()  # entries that the last token saw

    def __deepcopy__(self, memo: dict) -> SparseKVCache:
        """A copy that chooses from the same entries of the prompt."""
        other = copy.copy(self)
        other._gathered = copy.deepcopy(self._gathered, memo)
        other.ranking = copy.deepcopy(self.ranking, memo)
        return other

    def move(self, n: int) -> None:
        self.offset += n

    def add(self, keys: mx.array, values: mx.array) -> None:
        self._gathered.append(keys, values)

    def choice(self, captured: Captured) -> tuple[mx.array, mx.array]:
        self.n_seen, self.bias = self.size(), None
        if self.ranking.n_read == 0:
            return self._gathered.always()
        start = self.offset - captured.heads.shape[2]
        chosen, self.bias = self.ranking.choose(captured, start)
        found = self._gathered.read(chosen, self.ranking.rest)
        if self._n_recent > self._most_recent:
            self._move_recent(MAX_RECENT // 2)
        return found

    @property
    def _n_recent(self) -> int:
        """The latest entries of prompt and answer, which every token reads."""
        return self._gathered.n - self.ranking.n_first

    def _move_recent(self, n: int) -> None:
        """From now on tokens choose among the oldest `n` entries of the window and the answer, too."""
        start = self.ranking.n_first
        self.ranking.choose_among(rows(self._gathered.always(), start, start + n))
        self._gathered.remove(start, n)

    def hide(self, queries: mx.array, keys: mx.array, mask: Any) -> Any:
        """The mask of the attention function's call, with the bias of the rest's means in it."""
        if self.bias is None:
            return mask
        return biased(self.bias, keys.shape[2], mask)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        return create_attention_mask(N, self.n_entries, return_array, window_size)

    @property
    def state(self) -> tuple:
        return self._gathered.keys, self._gathered.values

    def held(self, n_queries: int = 0) -> Entries:
        """The entries that every token reads, without their positions."""
        return Entries(*self._gathered.always())

    @property
    def sample(self) -> tuple[mx.array, mx.array]:
        return self._gathered.always()

    def size(self) -> int:
        return self.n_means + self.ranking.n_read + self._gathered.n

    @property
    def n_means(self) -> int:
        """Of the entries that a token reads, means of what it does not read."""
        return self.ranking.n_means

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of what a token reads, the index among it."""
        if self._gathered.keys is None:
            return 0
        one, index = n_bytes(rows(self._gathered.always(), 0, 1)), self.ranking.view.index
        return one * self.n_entries + (0 if index is None else index.nbytes)

    def empty(self) -> bool:
        return False

    def is_trimmable(self) -> bool:
        return False
