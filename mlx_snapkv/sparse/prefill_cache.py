"""The cache of a prompt that is read sparsely: nothing is evicted, and every chunk reads few entries before it.

A chunk reads the sink, the tokens just before it, itself, and pages that its own queries choose, for each layer and
KV head (`page_ranking.py`). QUOKA (arXiv:2602.08722), MInference (Jiang et al., 2024, arXiv:2407.02490)
and XAttention (Xu et al., 2025, arXiv:2503.16428) read prompts so on CUDA. Here chosen entries are gathered, so
that a chunk is one ordinary call of the attention function.
"""

from __future__ import annotations

import mlx.core as mx

from ..caches.contract import keys_of
from ..entries.entries import Entries
from ..entries.quantization import join
from ..entries.queries import Captured
from .attending import AttendingCache
from .page_ranking import PageRanking
from .stored_cache import StoredKVCache


class SparsePrefillKVCache(AttendingCache):
    """A layer's cache while a prompt is read sparsely: appends to the cache of all entries, and reads few of them.

    Args:
        stored: the cache of all entries.
        ranking: chooses the entries that a chunk reads.

    Attributes:
        n_read: the most entries before it that a chunk has read by choice; None if no chunk has chosen.
    """

    keys = keys_of(lambda cache: cache.stored.growing)
    n_read: int | None = None
    _reads_all = True  # the newest tokens read all entries

    def __init__(self, stored: StoredKVCache, ranking: PageRanking):
        """Take over the cache of all entries, which may have read earlier turns."""
        self.stored = stored
        self._ranking = ranking

    @property
    def offset(self) -> int:  # type: ignore[override]
        """Return the number of tokens read."""
        return self.stored.offset

    @property
    def reads_some(self) -> bool:
        """Return whether the next tokens read only some of the entries."""
        return not self._ranking.reads_all(self.offset)

    @property
    def n_before_next(self) -> int:
        """Return how many entries before it the next chunk reads."""
        return self._ranking.n_read(self.offset)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append keys and values `(B, n_kv_heads, L, head_dim)`; return those of all entries if a chunk reads all.

        Otherwise return the new ones: `attend` reads the others.
        """
        self._reads_all = not self.reads_some
        if self._reads_all:
            return self.stored.update_and_fetch(keys, values)
        self.stored.add(keys, values)
        return keys, values

    def choose(
        self, captured: Captured, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array, None]:
        """Return the entries before a chunk that it reads, and its own, and record the prompt's last queries."""
        self.stored.record(captured)
        if not self._reads_all:
            keys, values = join(self._read_before(captured), (keys, values))
        return keys, values, None

    def _read_before(self, captured: Captured) -> tuple[mx.array, mx.array]:
        """Return the keys and values before the chunk that it reads by choice."""
        start = self.offset - captured.heads.shape[2]
        self.n_read = max(self.n_read or 0, self._ranking.n_read(start))
        if self.stored.sparse_from is None:
            self.stored.sparse_from = start
        return self._ranking.read(captured, start)

    def size(self) -> int:
        """Return how many entries before it the next chunk reads, for mlx-lm's masks."""
        return self.n_before_next

    @property
    def state(self) -> tuple:
        """Return entries, queries and page means, which mlx-lm evaluates after each chunk."""
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
