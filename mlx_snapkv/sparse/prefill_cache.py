"""The cache for sparse prefill: no entry is evicted, but each chunk reads only a few of the earlier entries.

In each layer and KV head, a chunk reads the sink, the tokens just before the chunk, the chunk itself, and the pages
that its queries choose (`page_ranking.py`). QUOKA (arXiv:2602.08722), MInference (Jiang et al., 2024, arXiv:2407.02490)
and XAttention (Xu et al., 2025, arXiv:2503.16428) choose in similar ways on CUDA. Here the chosen entries are gathered
into one array, so that a chunk needs only one ordinary call to the attention function.
"""

from __future__ import annotations

import mlx.core as mx

from ..caches.contract import keys_property
from ..entries.entries import Entries
from ..entries.quantization import concatenate_rows
from ..entries.queries import CapturedQueries
from .attending import AttendingCache
from .page_ranking import PageRanking
from .stored_cache import StoredKVCache


class SparsePrefillKVCache(AttendingCache):
    """One layer's cache during sparse prefill. It wraps the cache that keeps all entries.

    Args:
        stored: the cache that keeps all of the layer's entries.
        ranking: selects the entries that a chunk reads.

    Attributes:
        n_read: largest number of earlier entries that a chunk has read, not counting chunks that read all of them. None
            if every chunk has read all of them.
    """

    keys = keys_property(lambda cache: cache.stored.growing)
    n_read: int | None = None

    def __init__(self, stored: StoredKVCache, ranking: PageRanking):
        """Continue from the entries in `stored`, which may belong to earlier turns."""
        self.stored = stored
        self._ranking = ranking

    @property
    def offset(self) -> int:  # type: ignore[override]
        """Return the number of tokens read."""
        return self.stored.offset

    @property
    def reads_some(self) -> bool:
        """Return whether the next chunk reads only some of the earlier entries."""
        return self._ranking.reads_some(self.offset)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values `(B, n_kv_heads, L, head_dim)`.

        If the chunk reads all entries, return the keys and values of all entries. Otherwise return only the new keys
        and values, because `attend` adds the earlier entries that the chunk reads.
        """
        if not self.reads_some:
            return self.stored.update_and_fetch(keys, values)
        self.stored.append(keys, values)
        return keys, values

    def choose(
        self, captured: CapturedQueries, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array, None]:
        """Return the keys and values that a chunk reads, including its own.

        Also record the chunk's queries at the positions that `StoredKVCache.observe` set.
        """
        self.stored.record(captured)
        reads_all = keys.shape[2] == self.offset
        if not reads_all:
            earlier_entries = self._choose_earlier(captured)
            keys, values = concatenate_rows(earlier_entries, (keys, values))
        return keys, values, None

    def _choose_earlier(self, captured: CapturedQueries) -> tuple[mx.array, mx.array]:
        """Return the keys and values of the earlier entries that the chunk reads."""
        chunk_start = self.offset - captured.queries.shape[2]
        self.n_read = max(self.n_read or 0, self._ranking.n_read(chunk_start))
        if self.stored.sparse_from is None:
            self.stored.sparse_from = chunk_start
        return self._ranking.read(captured, chunk_start)

    def size(self) -> int:
        """Return the number of earlier entries that the next chunk reads."""
        return self._ranking.n_read(self.offset)

    @property
    def state(self) -> tuple:
        """Return the arrays of entries, recorded queries and page means, for mlx-lm to evaluate after each chunk."""
        return *self.stored.state, self._ranking.means.in_memory

    def held(self) -> Entries:
        """Return all entries, with the recorded queries as voters."""
        return self.stored.held()

    @property
    def full_nbytes(self) -> int:
        """Return the size in bytes of a full, unquantised cache of the same tokens."""
        return self.stored.full_nbytes

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Return the size in bytes of the entries that are in memory."""
        return self.stored.nbytes

    def empty(self) -> bool:
        """Return whether no token has been read."""
        return self.stored.empty()
