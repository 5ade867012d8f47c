"""The cache of a sparse answer: every token chooses the entries that it reads."""

from __future__ import annotations

import copy
from operator import attrgetter

import mlx.core as mx

from ..caches.contract import keys_of
from ..entries.entries import Entries
from ..entries.quantization import join, n_bytes, rows
from ..entries.queries import Captured
from .attending import AttendingCache
from .gathered import Gathered
from .token_ranking import TokenRanking

# Newest entries that every token reads; when there are more, the older half is ranked with the prompt's entries.
MAX_RECENT = 512


class SparseKVCache(AttendingCache):
    """A layer's cache while an answer is decoded: a token reads the sink, the entries that its own queries rank
    highest, the window, and the newest entries of the answer.

    It chooses among the prompt's entries and the older entries of the answer; see `TokenRanking`.
    """

    is_compressed = True
    keys = keys_of(attrgetter("_gathered"))

    def __init__(self, ranking: TokenRanking):
        self.ranking = ranking
        self.layer = ranking.view.layer
        self.offset = n = len(ranking.view)
        self._most_recent = max(MAX_RECENT, ranking.n_window + MAX_RECENT // 2)
        self._gathered = Gathered()
        if n:
            self._gathered.append(*ranking.always_read())
            mx.eval(self._gathered.always())

    def __deepcopy__(self, memo: dict) -> SparseKVCache:
        """Copy the cache; the copy shares the prompt's entries."""
        other = copy.copy(self)
        other._gathered = copy.deepcopy(self._gathered, memo)
        other.ranking = copy.deepcopy(self.ranking, memo)
        return other

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values `(B, n_kv_heads, L, head_dim)` of new tokens, and return them for `attend`."""
        self._gathered.append(keys, values)
        self.offset += keys.shape[2]
        return keys, values

    def choose(
        self, captured: Captured, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array, mx.array | None]:
        """Return the entries chosen, with the means and the entries that every token reads, and the means' bias."""
        if self.ranking.n_read == 0:
            return *self._gathered.always(), None
        start = self.offset - captured.heads.shape[2]
        chosen, bias = self.ranking.choose(captured, start)
        keys, values = self._gathered.read(chosen, self.ranking.residual)
        if self._n_recent > self._most_recent:
            self._move_recent(MAX_RECENT // 2)
        return keys, values, bias

    @property
    def _n_recent(self) -> int:
        """Return the number of newest entries of prompt and answer that every token reads."""
        return self._gathered.n - self.ranking.n_first

    def _move_recent(self, n: int) -> None:
        """Rank the `n` oldest recent entries with the others from now on; tokens no longer always read them."""
        start = self.ranking.n_first
        self.ranking.choose_among(rows(self._gathered.always(), start, start + n))
        self._gathered.remove(start, n)

    def entries_since(self, position: int) -> tuple[mx.array, mx.array]:
        """Return the keys and values of the tokens from `position` on, `(B, n_kv_heads, n, head_dim)`."""
        recent = self.offset - self._n_recent
        view = self.ranking.view
        start = self.ranking.n_first + max(0, position - recent)
        newest = rows(self._gathered.always(), start, self._gathered.n)
        if position >= recent:
            return newest
        older = view.read_keys(position, recent), view.read_values(position, recent)
        return join(older, newest)

    @property
    def state(self) -> tuple:
        return self._gathered.keys, self._gathered.values

    def held(self, n_queries: int = 0) -> Entries:
        """Return the entries that every token reads, without their positions."""
        return Entries(*self._gathered.always())

    @property
    def sample(self) -> tuple[mx.array, mx.array]:
        return self._gathered.always()

    def size(self) -> int:
        return self.n_means + self.ranking.n_read + self._gathered.n

    @property
    def n_means(self) -> int:
        """Return the number of cluster means that a token reads."""
        return self.ranking.n_means

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Return the bytes that a token reads, the index included."""
        if self._gathered.keys is None:
            return 0
        one = n_bytes(rows(self._gathered.always(), 0, 1))
        index = self.ranking.view.index
        return one * self.n_entries + (0 if index is None else index.nbytes)

    def empty(self) -> bool:
        return False
