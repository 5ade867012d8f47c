"""The cache with which a prompt is read sparsely: no entry is evicted, and each chunk reads few earlier entries.

In each layer and KV head, a chunk reads the sink, the tokens just before it, itself, and the pages that its own queries
choose (`page_ranking.py`). QUOKA (arXiv:2602.08722), MInference (Jiang et al., 2024, arXiv:2407.02490) and XAttention
(Xu et al., 2025, arXiv:2503.16428) read prompts in this way on CUDA. Here the chosen entries are gathered, so that a
chunk needs only one ordinary call of the attention function.
"""

from __future__ import annotations

import mlx.core as mx

from ..caches.contract import keys_property
from ..entries.entries import Entries
from ..entries.quantization import join
from ..entries.queries import Captured
from .attending import AttendingCache
from .page_ranking import PageRanking
from .stored_cache import StoredKVCache


class SparsePrefillKVCache(AttendingCache):
    """The cache of one layer while a prompt is read sparsely. It appends to the cache of all entries, and reads few.

    Args:
        stored: the cache that holds all entries.
        ranking: selects the entries that a chunk reads.

    Attributes:
        n_read: largest number of earlier entries that a chunk has chosen to read; None if no chunk has chosen.
    """

    keys = keys_property(lambda cache: cache.stored.growing)
    n_read: int | None = None
    _reads_all = True  # whether the newest tokens read all entries

    def __init__(self, stored: StoredKVCache, ranking: PageRanking):
        """Read on from the cache of all entries, which may hold earlier turns."""
        self.stored = stored
        self._ranking = ranking

    @property
    def offset(self) -> int:  # type: ignore[override]
        """Return the number of tokens read."""
        return self.stored.offset

    @property
    def reads_some(self) -> bool:
        """Return whether the next chunk reads only some of the entries."""
        return not self._ranking.reads_all(self.offset)

    @property
    def n_before_next(self) -> int:
        """Return the number of earlier entries that the next chunk reads."""
        return self._ranking.n_read(self.offset)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values `(B, n_kv_heads, L, head_dim)`; return those of all entries if the chunk reads all.

        Otherwise return the new keys and values; `attend` adds the earlier entries that the chunk reads.
        """
        self._reads_all = not self.reads_some
        if self._reads_all:
            return self.stored.update_and_fetch(keys, values)
        self.stored.add(keys, values)
        return keys, values

    def choose(
        self, captured: Captured, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array, None]:
        """Return the keys and values that a chunk reads, including its own, and record the queries that will vote."""
        self.stored.record(captured)
        if not self._reads_all:
            keys, values = join(self._read_before(captured), (keys, values))
        return keys, values, None

    def _read_before(self, captured: Captured) -> tuple[mx.array, mx.array]:
        """Return the keys and values of the earlier entries that the chunk chooses."""
        start = self.offset - captured.queries.shape[2]
        self.n_read = max(self.n_read or 0, self._ranking.n_read(start))
        if self.stored.sparse_from is None:
            self.stored.sparse_from = start
        return self._ranking.read(captured, start)

    def size(self) -> int:
        """Return the number of earlier entries that the next chunk reads, by which mlx-lm makes its mask."""
        return self.n_before_next

    @property
    def state(self) -> tuple:
        """Return entries, recorded queries and page means, which mlx-lm evaluates after each chunk."""
        return *self.stored.state, self._ranking.means.in_memory

    def held(self, n_queries: int = 0) -> Entries:
        """Return all entries, with the recorded queries."""
        return self.stored.held(n_queries)

    @property
    def full_nbytes(self) -> int:
        """Return the bytes of all entries, unpacked."""
        return self.stored.full_nbytes

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Return the bytes of all entries in memory."""
        return self.stored.nbytes

    def empty(self) -> bool:
        """Return whether no token has been read."""
        return self.stored.empty()
