"""The cache for decoding with sparse attention, where each token chooses the entries that it reads."""

from __future__ import annotations

import copy
from operator import attrgetter
from typing import Any

import mlx.core as mx

from ..caches.contract import keys_property
from ..entries.entries import Entries
from ..entries.quantization import count_bytes
from ..entries.queries import CapturedQueries
from .attending import AttendingCache
from .kernels.token import attend_token, why_plain_path
from .token_ranking import Pair, TokenRanking

# Every token reads all of the newest entries (window and answer). Once there are more than max(512, window + 256), the
# oldest 256 of them join the entries that tokens choose among.
MAX_RECENT = 512


class SparseKVCache(AttendingCache):
    """One layer's cache while an answer is decoded with sparse attention.

    Each token reads the entries that its queries rank highest, the sink, the window, the answer's newest entries and,
    if there is a residual, the cluster means. It chooses among the prompt's entries and the answer's older entries; see
    `TokenRanking`.
    """

    is_compressed = True
    keys = keys_property(attrgetter("ranking.answer"))

    def __init__(self, ranking: TokenRanking):
        """Start from a ranking that has no answer yet.

        All of the ranking's entries count as the prompt, even if the last ones are from answer tokens decoded earlier.
        """
        self.ranking = ranking
        self.layer = ranking.view.layer
        self._entry_nbytes = count_bytes(self.sample_entries)
        self._max_newest = max(MAX_RECENT, ranking.n_window + MAX_RECENT // 2)

    def __deepcopy__(self, memo: dict) -> SparseKVCache:
        """Copy the cache, but share the prompt's entries."""
        duplicate = copy.copy(self)
        duplicate.ranking = copy.deepcopy(self.ranking, memo)
        return duplicate

    @property
    def offset(self) -> int:  # type: ignore[override]
        """Return the position of the next token, counted from the start of the prompt."""
        return self.ranking.n_prompt + self.ranking.answer.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Pair:
        """Append keys and values `(B, n_kv_heads, L, head_dim)`, and return them unchanged for `attend`."""
        ranking = self.ranking
        tokens_choose = ranking.n_chosen > 0
        has_too_many_newest = ranking.n_newest > self._max_newest
        if tokens_choose and has_too_many_newest:
            ranking.choose_up_to(ranking.choice_stop + MAX_RECENT // 2)
        ranking.answer.update_and_fetch(keys, values)
        return keys, values

    def attend(
        self,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
    ) -> mx.array:
        """Compute the attention with the GPU kernels if possible, otherwise with `AttendingCache.attend`."""
        kernels_can_attend = why_plain_path(self.ranking, queries) is None
        if kernels_can_attend:
            captured = CapturedQueries(queries, scale, sinks)
            return attend_token(self.ranking, captured, position=self.offset - 1)
        return super().attend(queries, keys, values, scale, mask, sinks)

    def choose(
        self, captured: CapturedQueries, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array, mx.array | None]:
        """Return the keys and values that a token reads, and the bias of the cluster means' logits.

        Cluster means come first, then the chosen entries, then the entries that every token reads. If there are no
        means, the bias is None.
        """
        ranking = self.ranking
        if ranking.n_chosen == 0:
            keys, values = ranking.read(None)
            return keys, values, None
        first_position = self.offset - captured.queries.shape[2]
        positions = ranking.choose(captured, first_position)
        bias = None
        if ranking.residual is not None:
            bias = ranking.residual.bias(captured.queries, captured.scale, positions)
        keys, values = ranking.read(positions)
        return keys, values, bias

    @property
    def state(self) -> tuple:
        """Return the answer's buffers, for mlx-lm to evaluate after each step."""
        return self.ranking.answer.keys, self.ranking.answer.values

    def held(self) -> Entries:
        """Return the entries that every token reads, without their positions."""
        return Entries(*self.ranking.read(None))

    @property
    def sample_entries(self) -> Pair:
        """Return the first entry's key and value."""
        return self.ranking.view.read_keys(0, 1), self.ranking.view.read_values(0, 1)

    def size(self) -> int:
        """Return the number of entries that a token reads, including cluster means."""
        ranking = self.ranking
        return ranking.n_means + ranking.n_sink + ranking.n_chosen + ranking.n_newest

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Return the size in bytes of the entries and means that a token reads, plus the index's codes in memory."""
        index = self.ranking.view.index
        index_nbytes = 0 if index is None else index.codes.nbytes
        return self._entry_nbytes * self.n_entries + index_nbytes

    def empty(self) -> bool:
        """Return False, because the prompt has already been read."""
        return False
