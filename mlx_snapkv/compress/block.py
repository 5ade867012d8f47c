"""The KV cache of a fixed budget, which evicts whenever it is full."""

import math
from typing import Any, ClassVar

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from ..caches.contract import loadable
from ..entries.entries import Entries
from ..entries.quantization import Quantization, Stored, grown, n_rows, rows, with_room, write
from ..entries.queries import Captured
from ..entries.quota import UNLIMITED, Quota
from ..errors import SnapKVError
from .attention_count import AttentionCount
from .evicting import EvictingCache
from .policy import Policy
from .selection import select


@loadable
class BlockKVCache(EvictingCache):
    """A KV cache that never holds more than `quota.entries + block` entries per KV head, however many tokens it is fed.

        [0 : n_kept)        entries that an eviction left, in order of position, different ones in every head
        [n_kept : size())   the tokens since then

    Before an update that would not fit, the policy's best `quota.entries` are moved to the front. All of them precede
    the new tokens, so the mask is the ordinary causal one, aligned with the last entry. Keys keep the rotation of their
    original position; `offset` is the logical position of the next token. An update of more than `block` tokens is held
    in full until the next one.

    Attributes:
        counting: the attention that entries receive, if the policy asks for it, or `counting` is given.
        steady: positions of tokens that all attend to the same entries: an eviction precedes only the first of them. If
            they are more than `block`, they are held besides.
        expected: entries that it will hold at least: fewer than `quota.entries + block` save memory.
    """

    PARTS: ClassVar[dict[str, type]] = EvictingCache.PARTS | {"counting": AttentionCount}

    steady = range(0)
    expected = 0

    def __init__(
        self,
        policy: Policy | None,  # what chooses; with None everything stays
        quota: Quota,  # what an eviction leaves
        block: int,  # tokens that fit in besides
        *,
        layer: Any = None,
        last: float = math.inf,  # position before which queries may vote
        newest: int | None = None,  # how many of the last queries are kept for the votes
        quantization: Quantization | None = None,
        counting: AttentionCount | None = None,
    ):
        voting = policy.obs_window if policy and newest is None else newest
        super().__init__(last=last, newest=voting)
        self.keys = self.values = None
        self.offset = self._n = 0
        self.policy, self.quota, self.block = policy, quota, block
        self.layer, self.quantization = layer, quantization
        asks = policy is not None and policy.accumulates_attention
        self.counting = counting or AttentionCount(counts=asks)
        self._kept_positions: mx.array | None = None  # of the entries that the last eviction left

    @property
    def capacity(self) -> int:
        return self.quota.entries + self.block

    @property
    def _n_since(self) -> int:
        """Tokens since the last eviction."""
        return self._n - (0 if self._kept_positions is None else self._kept_positions.shape[2])

    @property
    def room(self) -> float:  # type: ignore[override]
        return math.inf if self.quota.entries >= UNLIMITED else self.capacity - self._n

    def append(self, keys: Stored, values: Stored) -> None:
        L = n_rows(keys)
        if self.is_due(L):
            self.evict()
        start, self._n = self._n, self._n + L
        self._write(start, keys, values)
        self.offset += L

    def place(self) -> int:
        self._n += 1
        self.offset += 1
        return self._n - 1

    @property
    def n_after_next(self) -> int:
        return (self.quota.entries if self.is_due() else self._n) + 1

    def evict(self) -> None:
        if self._n <= self.quota.entries:
            return
        assert self.policy is not None
        # Of older queries, entries after their own may be gone.
        entries = self.held(min(self.policy.obs_window, max(1, self.quota.n_window)))
        entries.budget, entries.n_window = self.quota.entries, self.quota.n_window
        kept = entries.taken(select(self.policy.score(entries), self.quota))
        # A buffer that is referred to elsewhere would be copied.
        entries.release()
        if n_rows(self.keys) > self.capacity:
            self.keys = self.values = None
        self.hold(kept)

    def hold(self, entries: Entries) -> None:
        """Hold `entries`, the best of all tokens up to `offset`, and nothing else."""
        entries = entries.packed(self.quantization)
        self._n = len(entries)
        self._write(0, entries.stored_keys, entries.stored_values)
        self._kept_positions = entries.positions
        self.counting = self.counting.of_entries(entries.received)

    def held(self, n_queries: int = 0) -> Entries:
        return self._rows(observed=self._observed(n_queries), received=self._received())

    def _take_queries(self, captured: Captured) -> None:
        super()._take_queries(captured)
        if self.counting.counts:
            self._count(captured)

    def _count(self, captured: Captured) -> None:
        """Count the attention of a call's queries, those of single tokens together."""
        n = min(self.last, self.offset) - (self.offset - captured.heads.shape[2])
        if n <= 0:
            return
        queries = mx.contiguous(captured.read(captured.heads[:, :, : int(n)]))
        self.counting = self.counting.with_queries(queries)
        if n > 1 or len(self.counting.waiting) >= self.block:
            self.counting = self.counting.of_entries(self._received())

    def _received(self) -> mx.array | None:
        """The attention that each entry has received, that of the waiting queries included, if it is counted."""

        def votes(queries: mx.array) -> mx.array:
            stop = int(min(self.last, self.offset))
            asking = self.voters(queries, range(stop - queries.shape[2], stop), shape)
            return self._rows(observed=asking).votes

        shape = *self._heads, self._n
        return self.counting.total(shape, votes)

    @property
    def recorded(self) -> list[mx.array]:
        return [*super().recorded, *self.counting.arrays]

    def is_due(self, L: int = 1) -> bool:
        if self.policy is None or self.offset in self.steady[1:]:
            return False
        L = max(L, len(self.steady)) if self.offset in self.steady else L
        votes = bool(self.policy.obs_window and not self._queries)
        votes |= self.policy.query_statistics is not None and not self.moments.sums
        if votes and not self._n_since:
            return False  # no query has voted for the entries given; the next tokens' will
        return self._n + L > self.capacity and self._n > self.quota.entries

    def _write(self, start: int, keys: Stored, values: Stored) -> None:
        """Put stored rows at `[start, _n)`, in buffers that have room for them."""
        have = 0 if self.keys is None else n_rows(self.keys)
        if self.keys is None or self._n > have:
            unlimited = self.quota.entries >= UNLIMITED
            most = with_room(self._n) if unlimited else self.capacity
            wanted = most if have else min(most, self.expected or most)
            held = (self.keys, self.values) if have else rows((keys, values), 0, 0)
            self.keys, self.values = grown(held, max(self._n, wanted) - have)
        write((self.keys, self.values), start, (keys, values))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        if window_size is not None:
            raise SnapKVError("a layer with sliding-window attention can't have a budget")
        if N == 1:
            return None
        if not return_array:
            return "causal"
        n = min(self._n, self.quota.entries) if self.is_due(N) else self._n
        return create_causal_mask(N, n)

    @property
    def positions(self) -> mx.array:  # type: ignore[override]
        kept, n = self._kept_positions, self._n_since
        newest = mx.arange(self.offset - n, self.offset, dtype=mx.uint32)
        newest = mx.broadcast_to(newest, (*self._heads, n))
        return newest if kept is None else mx.concatenate([kept, newest], axis=2)
