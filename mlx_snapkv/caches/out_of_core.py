"""The out-of-core KV cache: a fixed budget in memory, and every entry in a store."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..entries.entries import Entries
from ..entries.key_index import KeyIndex
from ..entries.quantization import Stored, rows
from ..errors import Missing
from ..policies import Policy
from ..policies.budgets import UNLIMITED, Quota
from .adapter import full_cache
from .block import BlockKVCache
from .compaction import Compaction
from .contract import LosslessCache, Mark
from .evicting import snapshot
from .full_view import FullView
from .stores import Store

_CLOSED: Any = Missing(
    "this cache came from a file without the entries beside it: load it with mlx_snapkv's saved.load or "
    "Conversation.load"
)


class OutOfCoreKVCache(LosslessCache, BlockKVCache):
    """A `BlockKVCache` of resident entries, and a store of all entries.

    The tokens since the last eviction are together in the resident buffers, and go to the store just before the next,
    a block at a time. Before `limit` everything is resident, and nothing stored. Whoever loads it gives it its store.
    """

    TRANSIENT = BlockKVCache.TRANSIENT | {"store", "_index"}

    def __init__(self, store: Store, layer: Any = None):
        super().__init__(None, Quota(UNLIMITED, 0, 0), KVCache.step, layer=layer, newest=1)
        self.store = store
        self._index: KeyIndex | None = None

    def limit(
        self,
        policy: Policy,
        quota: Quota,
        expected: int,
        compaction: Compaction | None = None,
        **attributes: Any,
    ) -> None:
        """Set the budget, and which queries to record, from now on; see `BlockKVCache`."""
        self.policy, self.quota, self.block = policy, quota, policy.block
        self._expected = expected
        self.compaction = None if compaction is None else compaction.after(self.compaction)
        vars(self).update(attributes)
        if self._n and not self._queries:
            # No query has voted for these yet; the next tokens' will.
            self._rotations, self._kept_positions = self.rotations, self.positions

    def append(self, keys: Stored, values: Stored) -> None:
        _ = self.store.n_entries  # an error if the cache was loaded without its store
        super().append(keys, values)

    def _evict(self) -> None:
        if self._n > self.quota.entries:
            self.offload()
        super()._evict()

    def offload(self) -> None:
        n_before = self.store.n_entries
        n_new = self.offset - n_before
        if n_new > 0:
            keys, values = rows((self.keys, self.values), self._n - n_new, self._n)
            new = Entries(keys, values, quantization=self.quantization, layer=self.layer)
            self.store.append(new)
            self._add_to_index(new.keys, n_before)

    def _add_to_index(self, keys: mx.array, n_before: int) -> None:
        """Add the keys behind the first `n_before` to the index; when it is outgrown, make it anew of all."""
        if self._index is None or self._index.outgrown_by(self.store.n_entries):
            queries = self.queries if self._queries else None
            self._index = FullView([self.store], self.layer).make_index(queries)
        else:
            self._index.truncate(n_before)
            self._index.append(keys)

    @property
    def index(self) -> KeyIndex | None:  # type: ignore[override]
        """Of the keys in the store; None if it has not been made, as after loading."""
        if self._index is None or len(self._index) < self.store.n_entries:
            return None
        self._index.truncate(self.store.n_entries)
        return self._index

    @index.setter
    def index(self, index: KeyIndex | None) -> None:
        self._index = index

    def views(self) -> list[Store]:
        self.offload()
        return [self.store]

    def saved_form(self) -> Any:
        """Itself, whose store is to be saved with it; a plain cache if everything is resident."""
        if self.policy is None:
            return KVCache() if self.empty() else full_cache(Entries(*self.keys_and_values()))
        self.offload()
        return self

    def fill(self, entries: Entries) -> None:
        self.hold(entries.packed(None))
        self.offset = len(entries)

    @property
    def is_compressed(self) -> bool:  # type: ignore[override]
        """Whether entries were evicted, so that some are in the store only."""
        return self._n < self.offset

    def mark(self) -> None:
        # Evictions are undone by themselves; all else goes back to what it was.
        kept = {"keys", "values", "store", "_index", "_mark"}
        own = {name: value for name, value in vars(self).items() if name not in kept}
        self._mark = Mark(snapshot(own))

    def rollback(self, n: int) -> None:
        super().rollback(n)
        self.store.truncate(self.offset)
        if self._mark and self.offset == self._mark.state.get("offset"):
            vars(self).update(snapshot(self._mark.state))

    @property
    def kv_nbytes(self) -> int:
        return super().kv_nbytes + self.store.nbytes

    @property
    def state(self) -> tuple:
        """What is resident, and the index; the store is no part of it."""
        return (*super().state, None if self._index is None else self._index.state)

    @state.setter
    def state(self, v: Sequence) -> None:
        *own, index = v
        BlockKVCache.state.fset(self, tuple(own))  # type: ignore[attr-defined]
        keys = Entries(self.keys, self.values, quantization=self.quantization).plain()[0]
        self._index = None if index is None else KeyIndex.restored(index, keys)
        self.store = _CLOSED
