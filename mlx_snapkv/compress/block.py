"""A fixed-budget KV cache that evicts entries whenever it is full."""

import math
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask

from ..caches.contract import loadable
from ..entries.entries import Entries
from ..entries.quantization import (
    Quantization,
    Stored,
    count_rows,
    rows_to_allocate,
    slice_rows,
    with_new_rows,
    write_rows,
)
from ..entries.queries import CapturedQueries, Queries
from ..entries.quota import UNLIMITED, Quota
from ..errors import SnapKVError
from .evicting import EvictingCache
from .policies import policy_named
from .policy import Policy
from .selection import select


@loadable
class BlockKVCache(EvictingCache):
    """A KV cache capped at `quota.entries + block` entries per KV head, however many tokens it reads.

        [0 : n_kept)        entries kept by each KV head at the last eviction, in order of position
        [n_kept : size())   entries added since the last eviction

    If the next tokens don't fit, the cache first evicts all but `quota.entries` entries and moves the kept entries to
    the front. All entries in the cache precede the new tokens, so the usual causal mask applies. Keys keep their
    original RoPE rotation, and `offset` is the next token's position in the text. An update of more than `block` tokens
    is kept in full until the next update.

    Args:
        policy: policy that scores the entries.
        quota: number of entries to keep at each eviction.
        block: number of tokens between evictions.
        layer: the cache's `AttentionLayer`.
        last: only queries before this position vote.
        newest: number of recent queries to keep for voting. Defaults to `policy.obs_window`.
        quantization: how the entries are quantised, or None if they are not.
        counts_attention: whether to count the attention that entries receive, even if `policy` does not need it.

    Attributes:
        steady: positions of tokens that must all see the same entries, so nothing is evicted between them. If there are
            more than `block` of them, the cache exceeds its capacity.
        expected_size: number of entries expected if nothing is evicted, or 0 if unknown. The first buffers have this
            many rows, but at most `capacity`, unless the first update has more tokens.
    """

    SAVED_NUMBERS = (*EvictingCache.SAVED_NUMBERS, "block")

    steady = range(0)
    expected_size = 0

    def __init__(
        self,
        policy: Policy,
        quota: Quota,
        block: int,
        *,
        layer: Any = None,
        last: float = math.inf,
        newest: int | None = None,
        quantization: Quantization | None = None,
        counts_attention: bool = False,
    ):
        """Start empty. The first update allocates the buffers."""
        super().__init__(last=last, newest=policy.obs_window if newest is None else newest)
        self.keys = self.values = None
        self.offset = self._n_entries = 0
        self.policy = policy
        self.quota = quota
        self.block = block
        self.layer = layer
        self.quantization = quantization
        self.counts_attention = counts_attention or policy.accumulates_attention
        # Attention received by the first `n` entries, `(B, n_kv_heads, n)` float32; None before the first count.
        self._counted_attention: mx.array | None = None
        # Queries of single tokens whose attention has not been counted yet, `(B, n_heads, 1, head_dim)` each. Counting
        # reads all keys, so up to `block` of these queries are collected first.
        self._waiting_queries: list[mx.array] = []
        # Positions of the entries in the first rows, uint32 `(B, n_kv_heads, n_kept)`; None before the first eviction.
        self._kept_positions: mx.array | None = None

    def _saved_numbers(self) -> dict[str, Any]:
        """Return the attributes to save as JSON, by name."""
        return super()._saved_numbers() | {
            "policy": str(self.policy),
            "quota": vars(self.quota),
            "steady": [self.steady.start, self.steady.stop],
            "counts": self.counts_attention,
        }

    def _saved_arrays(self) -> dict[str, Any]:
        """Return the attributes to save as arrays, by name."""
        return super()._saved_arrays() | {
            "kept_positions": self._kept_positions,
            "received": self._counted_attention,
            "waiting": self._waiting_queries,
        }

    def _restore(self, numbers: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Restore the saved attributes."""
        super()._restore(numbers, arrays)
        self.policy = policy_named(numbers["policy"])
        self.quota = Quota(**numbers["quota"])
        self.steady = range(*numbers["steady"])
        self._kept_positions = arrays.get("kept_positions")
        self.counts_attention = numbers["counts"]
        self._counted_attention = arrays.get("received")
        self._waiting_queries = list(arrays.get("waiting", []))

    @property
    def observes(self) -> bool:  # type: ignore[override]
        """Return whether the policy needs the answer's queries."""
        return self.policy.observes_answer

    @property
    def capacity(self) -> int:
        """Return the maximum number of entries per KV head."""
        return self.quota.entries + self.block

    @property
    def _n_since_eviction(self) -> int:
        """Return the number of tokens read since the last eviction."""
        n_kept = 0 if self._kept_positions is None else self._kept_positions.shape[2]
        return self._n_entries - n_kept

    @property
    def room(self) -> float:  # type: ignore[override]
        """Return the number of tokens that fit before the next eviction, or infinity if the cache never evicts."""
        return math.inf if self.quota.entries >= UNLIMITED else self.capacity - self._n_entries

    def append(self, keys: Stored, values: Stored) -> None:
        """Append the stored keys and values of `L` tokens. If they don't fit, evict entries first."""
        L = count_rows(keys)
        if self.must_evict(L):
            self.evict()
        first_row = self._n_entries
        self._n_entries += L
        self._write(first_row, keys, values)
        self.offset += L

    def claim_row(self) -> int:
        """Count a new token, and return the row where the caller must write the token's entry."""
        self._n_entries += 1
        self.offset += 1
        return self._n_entries - 1

    @property
    def n_after_next(self) -> int:
        """Return the number of entries after one more token."""
        n_before = self.quota.entries if self.must_evict() else self._n_entries
        return n_before + 1

    def evict(self) -> None:
        """Evict all but `quota.entries` entries, if there are more.

        Keep the sink, the window and the highest-scoring entries in between.
        """
        if self._n_entries <= self.quota.entries:
            return
        entries = self.held()
        entries.quota = self.quota
        if self.policy.obs_window > 0:
            entries.voting_queries = self._window_voters(entries.voting_queries)
        kept_indices = select(self.policy.score(entries), self.quota)
        kept_entries = entries.take(kept_indices)
        # Drop the other references to the buffers, because writing to a shared buffer copies it.
        entries.release()
        # Discard buffers enlarged by an update of more than `block` tokens.
        exceeds_capacity = count_rows(self.keys) > self.capacity
        if exceeds_capacity:
            self.keys = self.values = None
        self.replace_entries(kept_entries)

    def _window_voters(self, voters: Queries | None) -> Queries:
        """Return the last `policy.obs_window` voters, but only those in the recent window.

        Entries that earlier voters saw may have been evicted. If there is no recent window, return only the last voter.

        Raises: SnapKVError: no queries were recorded.
        """
        if voters is None:
            raise SnapKVError(
                f"{self.policy.name} lets the answer's own queries vote, and they were not recorded: use mlx_snapkv's "
                "generate_step, or call patch_for_snapkv(model) before mlx-lm's"
            )
        return voters.latest(min(self.policy.obs_window, max(1, self.quota.n_window)))

    def replace_entries(self, entries: Entries) -> None:
        """Replace all entries with `entries`, which must be sorted by position and precede `offset`."""
        entries = entries.with_quantization(self.quantization)
        self._n_entries = len(entries)
        self._write(0, entries.stored_keys, entries.stored_values)
        self._kept_positions = entries.positions
        self._counted_attention = entries.received_attention
        self._waiting_queries = []

    def held(self) -> Entries:
        """Return the entries, in order of position, with the recorded queries as voters."""
        return self._entries_in_row_order(
            voting_queries=self.recorded_voters((*self._batch_and_heads, self._n_entries)),
            received_attention=self._received_attention(),
        )

    def _record_chunk(self, captured: CapturedQueries) -> None:
        """Record the newest queries and, if `counts_attention` is set, count the attention that entries receive."""
        super()._record_chunk(captured)
        if self.counts_attention:
            self._count_attention(captured)

    def _count_attention(self, captured: CapturedQueries) -> None:
        """Count the attention that entries receive from the queries of one attention call.

        The call's own entries are already in the cache. Queries from position `last` on are left out. Single queries
        are collected, and counted once there are `block` of them, a call with several queries follows, or entries are
        evicted.
        """
        chunk_start = self.offset - captured.queries.shape[2]
        n_voters = int(min(self.last, self.offset)) - chunk_start
        if n_voters <= 0:
            return
        queries = mx.contiguous(captured.to_key_space(captured.queries[:, :, :n_voters]))
        self._waiting_queries = [*self._waiting_queries, queries]
        is_chunk = n_voters > 1
        is_block_complete = len(self._waiting_queries) >= self.block
        if is_chunk or is_block_complete:
            self._counted_attention = self._received_attention()
            self._waiting_queries = []

    def _received_attention(self) -> mx.array | None:
        """Return the attention that each entry has received, `(B, n_kv_heads, size())` float32, or None if unknown."""
        if not self.counts_attention and self._counted_attention is None:
            return None
        B, H = self._batch_and_heads
        counted_attention = self._counted_attention
        if counted_attention is None:
            counted_attention = mx.zeros((B, H, 0))
        # Entries appended since the last count start at 0.
        n_new = self._n_entries - counted_attention.shape[2]
        received_attention = mx.pad(counted_attention, [(0, 0), (0, 0), (0, n_new)])
        if self._waiting_queries:
            queries = mx.concatenate(self._waiting_queries, axis=2)
            # The waiting queries belong to the newest tokens before `last`.
            stop = int(min(self.last, self.offset))
            positions = range(stop - queries.shape[2], stop)
            voters = self.make_voters(queries, positions, (B, H, self._n_entries))
            new_votes = self._entries_in_row_order(voting_queries=voters).votes
            received_attention = received_attention + new_votes
        return received_attention

    @property
    def recorded(self) -> list[mx.array]:
        """Return the recorded arrays; see `Recorder.recorded`."""
        counted = [] if self._counted_attention is None else [self._counted_attention]
        return [*super().recorded, *self._waiting_queries, *counted]

    def must_evict(self, L: int = 1) -> bool:
        """Return whether entries must be evicted before the next `L` tokens are appended."""
        is_between_steady_tokens = self.offset in self.steady[1:]
        if is_between_steady_tokens:
            return False
        lacks_votes = self.policy.obs_window > 0 and not self._queries
        lacks_statistics = self.policy.query_statistics is not None and not self.moments.sums
        if (lacks_votes or lacks_statistics) and self._n_since_eviction == 0:
            return False  # no queries have been recorded yet; wait for those of the next tokens
        n_next = L
        if self.offset in self.steady:  # before the first steady token, make room for all of them
            n_next = max(L, len(self.steady))
        has_room = self._n_entries + n_next <= self.capacity
        return not has_room and self._n_entries > self.quota.entries

    def _write(self, start: int, keys: Stored, values: Stored) -> None:
        """Write stored entries to rows `[start, size())`, enlarging the buffers first if necessary."""
        n_allocated = 0 if self.keys is None else count_rows(self.keys)
        if self.keys is None or self._n_entries > n_allocated:
            # The first buffers get the format of the new entries.
            buffers = (self.keys, self.values) if n_allocated else slice_rows((keys, values), 0, 0)
            n_needed = self._n_rows_to_allocate(n_allocated)
            self.keys, self.values = with_new_rows(buffers, n_needed - n_allocated)
        write_rows((self.keys, self.values), start, (keys, values))

    def _n_rows_to_allocate(self, n_allocated: int) -> int:
        """Return the number of rows for new buffers, which is at least `size()`.

        Once the budget is full, a whole block more is allocated, so that later tokens never reallocate.

        Args:
            n_allocated: number of rows in the current buffers, or 0 if there are no buffers.
        """
        are_first_buffers = n_allocated == 0
        if are_first_buffers and self.expected_size:
            n_rows = self.expected_size
        elif self._n_entries >= self.quota.entries:
            n_rows = self.capacity
        else:
            n_rows = rows_to_allocate(self._n_entries)
        return max(self._n_entries, min(n_rows, self.capacity))

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """Return the mask for the next `N` tokens: None, "causal", or a bool array `(N, n + N)`.

        `n` is the number of entries that precede these tokens after any eviction.
        """
        if window_size is not None:
            raise SnapKVError("a layer with sliding-window attention can't have a budget")
        if N == 1:
            return None
        if not return_array:
            return "causal"
        n_before = self._n_entries
        if self.must_evict(N):
            n_before = min(n_before, self.quota.entries)
        return create_causal_mask(N, offset=n_before)

    @property
    def positions(self) -> mx.array:  # type: ignore[override]
        """Return the entries' original positions in ascending order, uint32 `(B, n_kv_heads, size())`."""
        n_recent = self._n_since_eviction
        recent_positions = mx.arange(self.offset - n_recent, self.offset, dtype=mx.uint32)
        recent_positions = mx.broadcast_to(recent_positions, (*self._batch_and_heads, n_recent))
        if self._kept_positions is None:
            return recent_positions
        return mx.concatenate([self._kept_positions, recent_positions], axis=2)
