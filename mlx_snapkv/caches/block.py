"""The KV cache of a fixed budget: it evicts by itself whenever it is full."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import _BaseCache

from ..entries.entries import Entries
from ..entries.quantization import (
    Quantization,
    Stored,
    arrays,
    each,
    join,
    n_bytes,
    n_rows,
    pack,
    write,
)
from ..entries.selection import has_nan, nan_scores
from ..errors import SnapKVError, TrimError
from ..models import AttentionFamily
from ..policies import Policy
from ..policies.budgets import UNLIMITED, Quota
from .self_evicting import SelfEvicting


class BlockKVCache(SelfEvicting, _BaseCache):
    """A KV cache that never holds more than `quota.rows + block` rows per KV head, however many tokens it is fed.

        [0 : n_kept)        rows that an eviction left, in order of position, different ones in every head
        [n_kept : size())   the tokens since then

    Before an update that would not fit, the policy's best `quota.rows` rows are moved to the front, so every token
    attends to all rows held when it came. All rows precede the new tokens, so the mask is the ordinary causal
    one, aligned with the last row. Keys keep the rotation of their original position; `offset` is the
    logical position of the next token.

    An update of more than `block` tokens, which our own loops never make, is held in full until the next one.

    Args:
        policy: who chooses. If it votes, the attention class must be patched while tokens are fed.
        quota: what an eviction leaves.
        block: tokens that fit in besides.
        family: the layer's attention family, for policies that vote.
        last: position behind the last query that votes.
        newest: how many of the last queries are kept for the votes.
        expected: tokens that will be fed at least; a smaller number than `quota.rows + block` saves memory.
        uniform: all layers of the model have the same quota.
    """

    quantization: Quantization | None = None

    def __init__(
        self,
        policy: Policy,
        quota: Quota,
        block: int,
        *,
        family: AttentionFamily | None = None,
        last: float = float("inf"),
        newest: int | None = None,
        expected: int = 0,
        uniform: bool = True,
    ):
        super().__init__(last=last, newest=policy.obs_window if newest is None else newest)
        self.keys: Any = None
        self.values: Any = None
        self.offset = 0
        self.policy = policy
        self.quota = quota
        self.block = block
        self.tallies = policy.accumulates_attention
        self.selection_seconds = 0.0
        self._family = family
        self._expected = expected
        self._uniform = uniform
        self._n = 0
        self._kept_positions: mx.array | None = None  # of the rows that the last eviction left
        self._received: mx.array | None = None  # attention counted so far, by row
        self._uncounted: list[mx.array] = []  # queries of single tokens, still to be counted

    @property
    def capacity(self) -> int:
        """Rows that fit in."""
        return self.quota.rows + self.block

    @property
    def room(self) -> int:
        return self.capacity - self._n

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Stored, Stored]:
        """Add `(B, n_kv_heads, L, head_dim)` keys and values; the rows the attention is to see."""
        L = keys.shape[2]
        if self._must_evict(L):
            self.evict()
        start, self._n = self._n, self._n + L
        self._write(start, pack(keys, self.quantization), pack(values, self.quantization))
        self.offset += L
        return self.keys_and_values()

    def evict(self) -> None:
        """Leave no more than the quota's rows."""
        if self._n <= self.quota.rows:
            return
        started = time.perf_counter()
        rows = self.rows(self.policy.obs_window)
        scores = self.policy.score(rows)
        if has_nan(scores).item():
            raise nan_scores()
        self.keep(self.quota.select(scores), rows)
        self.selection_seconds += time.perf_counter() - started

    def keep(self, chosen: mx.array, rows: Entries) -> None:
        """Move the chosen of `rows()`, uint32 `(B, n_kv_heads, n)`, ascending, to the front; the others are gone."""
        kept = rows.taken(chosen)
        mx.eval(kept.stored_keys, kept.positions)
        mx.eval(kept.stored_values)
        # A buffer that is referred to elsewhere would be copied.
        rows.release()
        if n_rows(self.keys) > self.capacity:
            self.keys = self.values = None
        self.hold(kept)

    def hold(self, rows: Entries) -> None:
        """Hold `rows`, the best of all tokens up to `offset`, and nothing else."""
        rows = rows.packed(self.quantization)
        self._n = len(rows)
        self._write(0, rows.stored_keys, rows.stored_values)
        mx.eval(self.keys, self.values)
        self._kept_positions = rows.positions
        self._received = rows.received

    def rows(self, n_queries: int) -> Entries:
        """What the cache holds, for a policy to score by the last `n_queries` queries."""
        keys, values = self.keys_and_values()
        self._count()
        rows = Entries(
            keys,
            values,
            given_positions=self.positions,
            received=self._received,
            quantization=self.quantization,
        )
        self._ask(rows, n_queries)
        return rows

    def make_room(self, n: int) -> None:
        """Evict now, if `n` tokens would not fit in; they can then be taken back.

        Raises:
            SnapKVError: they are more than a block.
        """
        if n > self.block:
            raise SnapKVError(f"block must be at least lookahead={n}, got {self.block}")
        if self._must_evict(n):
            self.evict()

    def record(self, queries: mx.array, scale: float, sinks: mx.array | None = None) -> None:
        super().record(queries, scale, sinks)
        n = min(self.last, self.offset) - (self.offset - queries.shape[2])
        if self.tallies and n > 0:
            self._uncounted.append(mx.contiguous(queries[:, :, : int(n)]))
            if n > 1 or len(self._uncounted) >= self.block:
                self._count()

    def _count(self) -> None:
        """Add the attention of the queries not counted yet."""
        if not self.tallies:
            return
        received = mx.zeros((*self._heads, 0)) if self._received is None else self._received
        received = mx.pad(received, [(0, 0), (0, 0), (0, self._n - received.shape[2])])
        if self._uncounted:
            queries = mx.concatenate(self._uncounted, axis=2)
            rows = Entries(*self.keys_and_values(), quantization=self.quantization)
            stop = int(min(self.last, self.offset))
            rows.observed = self._observed(queries, range(stop - queries.shape[2], stop), rows)
            received = received + rows.votes
            mx.eval(received)
        self._received = received
        self._uncounted = []

    @property
    def _heads(self) -> tuple[int, ...]:
        """`(B, n_kv_heads)`."""
        return arrays(self.keys)[0].shape[:2]

    def _must_evict(self, L: int) -> bool:
        return self._n + L > self.capacity and self._n > self.quota.rows

    def _write(self, start: int, keys: Stored, values: Stored) -> None:
        """Put stored rows at `[start, _n)`, in buffers that have room for them."""
        have = 0 if self.keys is None else n_rows(self.keys)
        if self._n > have:
            most = self.capacity if self.quota.rows < UNLIMITED else self._n + self.block
            first = min(most, self._expected or most)
            more = max(self._n, most if have else first) - have
            self.keys, self.values = (
                _grown(held, like, more)
                for held, like in ((self.keys, keys), (self.values, values))
            )
        write(self.keys, start, keys)
        write(self.values, start, values)

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """The mask of the next update of `N` tokens: None, `"causal"`, or bool `(N, rows)`.

        Raises:
            SnapKVError: the model wants one array for all layers, whose rows differ in number.
        """
        if window_size is not None:
            raise SnapKVError("a layer with sliding-window attention can't have a budget")
        if N == 1:
            return None
        if not return_array:
            return "causal"
        if not self._uniform:
            raise SnapKVError(
                "this model makes one mask for all layers, so they must keep equally many rows: "
                "give budget as a number or a share"
            )
        return create_causal_mask(
            N, min(self._n, self.quota.rows) if self._must_evict(N) else self._n
        )

    @property
    def positions(self) -> mx.array:
        """uint32 `(B, n_kv_heads, size())`: the original position of every row."""
        kept = self._kept_positions
        n_kept = 0 if kept is None else kept.shape[2]
        since = mx.arange(self.offset - (self._n - n_kept), self.offset, dtype=mx.uint32)
        since = mx.broadcast_to(since, (*self._heads, self._n - n_kept))
        return since if kept is None else mx.concatenate([kept, since], axis=2)

    def keys_and_values(self) -> tuple[Stored, Stored]:
        keys, values = (each(lambda x: x[..., : self._n, :], y) for y in (self.keys, self.values))
        return keys, values

    def size(self) -> int:
        """Rows held."""
        return self._n

    def empty(self) -> bool:
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values, with the room for the next block."""
        return 0 if self.keys is None else n_bytes(self.keys) + n_bytes(self.values)

    def is_trimmable(self) -> bool:
        """True: every `trim` that returns is an exact rewind, any other raises."""
        return True

    def trim(self, n: int) -> int:
        """Take back the newest `n` tokens, exactly.

        Raises:
            TrimError: some of them were there at the last eviction, or their attention is counted already.
        """
        n_kept = 0 if self._kept_positions is None else self._kept_positions.shape[2]
        free = len(self._uncounted) if self.tallies else self._n - n_kept
        if self._before is not None and n > free:
            return self._trim_behind_eviction(n)
        if not 0 <= n <= free:
            raise TrimError(
                f"this cache can take back 0 to {free} tokens, those since its last eviction, not {n}"
            )
        self._n -= n
        self.offset -= n
        del self._uncounted[len(self._uncounted) - n :]
        return n

    @property
    def state(self) -> tuple:
        """Arrays, numbers, strings and None only, as `save_prompt_cache` wants it, the queries among them."""
        return (
            *(getattr(self, name) for name in _STATE),
            *dataclasses.astuple(self.quota),
            self._uncounted or None,
            *self._choice_state(),
        )

    @state.setter
    def state(self, v) -> None:
        *plain, rows, n_sink, n_window, uncounted, policy, scale, queries = v
        self._take_choice_state(policy, scale, queries)
        for name, value in zip(_STATE, plain, strict=True):
            setattr(self, name, value)
        self.quota = Quota(rows, n_sink, n_window)
        self._uncounted = uncounted or []
        self.selection_seconds = 0.0


_STATE = (
    "keys", "values", "offset", "_n", "block", "first", "last", "newest", "sinks", "_stop", "tallies",
    "_kept_positions", "_received", "_expected", "_uniform",
)  # fmt: skip


def _grown(held: Stored | None, like: Stored, more: int) -> Stored:
    """Stored rows with room for more of them."""

    def room(array: mx.array) -> mx.array:
        return mx.zeros((*array.shape[:2], more, array.shape[3]), array.dtype)

    return each(room, like) if held is None else join(held, each(room, like))
