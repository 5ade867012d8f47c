"""The cache of a prompt that is read sparsely: nothing is evicted, and every chunk reads little of what came before it.

A chunk reads the sink, the tokens just before it, itself, and pages of neighbours that its own queries choose, for
each layer and KV head (`page_ranking.py`). QUOKA (arXiv:2602.08722), MInference (Jiang et al., 2024, arXiv:2407.02490)
and XAttention (Xu et al., 2025, arXiv:2503.16428) read prompts so on CUDA; here what was chosen is gathered, so that a
chunk is one ordinary call of the attention function.
"""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models.cache import create_attention_mask

from ..caches.contract import LayerCache, keys_of
from ..entries.entries import Entries
from ..entries.quantization import join
from ..entries.queries import Captured
from .choosing import Choosing
from .page_ranking import PageRanking
from .stored_cache import StoredKVCache


class SparsePrefillKVCache(Choosing, LayerCache):
    """Adds to a cache that holds all entries; each chunk reads some of them, which the ranking says."""

    keys = keys_of(lambda cache: cache.everything.growing)
    _reads_all = False  # the newest tokens did
    _again = False  # they came a second time
    n_read: int | None = None  # the most of those before it that a chunk has chosen to read

    def __init__(self, everything: StoredKVCache, ranking: PageRanking):
        self.everything, self.layer, self._ranking = everything, everything.layer, ranking
        self.offset = everything.offset

    @property
    def reads_some(self) -> bool:
        """Whether the next tokens do not read everything."""
        return not self._ranking.reads_all(self.offset)

    @property
    def n_before_next(self) -> int:
        return self._ranking.n_read(self.offset)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self._again = self._chosen is not None
        self._reads_all = not self._again and not self.reads_some
        if self._reads_all:
            self.move(keys.shape[2])
            return self.everything.update_and_fetch(keys, values)
        return super().update_and_fetch(keys, values)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.everything.keys_and_values() if self._reads_all else super().keys_and_values()

    def move(self, n: int) -> None:
        self.offset += n

    def add(self, keys: mx.array, values: mx.array) -> None:
        self._own = keys, values
        self.everything.add(keys, values)

    def size(self) -> int:
        return self._ranking.n_read(self.offset - self._n_new) + self._n_new

    def record(self, captured: Captured) -> None:
        if captured.borrowed or not self._again:
            self.everything.record(captured)
        super().record(captured)

    @property
    def waits_for_readers(self) -> bool:  # type: ignore[override]
        return self.everything.waits_for_readers

    def choice(self, captured: Captured) -> tuple[mx.array, mx.array]:
        start = self.offset - self._n_new
        self.n_read = max(self.n_read or 0, self._ranking.n_read(start))
        if self.everything.sparse_from is None:
            self.everything.sparse_from = start
        return join(self._ranking.read(captured, start), self._own)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        return create_attention_mask(N, self.n_before_next, return_array, window_size)

    @property
    def state(self) -> tuple:
        return *self.everything.state, self._ranking.means.in_memory

    def held(self, n_queries: int = 0) -> Entries:
        return self.everything.held(n_queries)

    @property
    def full_nbytes(self) -> int:
        return self.everything.full_nbytes

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.everything.nbytes

    def empty(self) -> bool:
        return self.everything.empty()

    def is_trimmable(self) -> bool:
        return False
