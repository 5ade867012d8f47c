"""The decoding cache of a compressed prompt: a fixed shape."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx

from ..entries.entries import Entries
from ..entries.quantization import Quantization, Stored, each, grown, join, n_rows, rows, write
from ..errors import SnapKVError
from ..policies import Policy
from . import ring
from .compaction import looked_up
from .evicting import EvictingCache
from .state import SavedState, is_per_entry

SLACK = 16  # rows behind the window, once several tokens have come at a time


class SnapKVCache(EvictingCache):
    """A KV cache of fixed shape: pinned entries and a recent window that slides.

        [0 : n_pin)            pinned: sink and voted middle
        [n_pin : n_keep)       recent window; a decoded token overwrites the oldest row (a ring)
        [n_keep : )            pending: tokens that came several at a time

    Keys keep the rotation of their original position; `offset` is the logical position of the next token, whatever
    the number of rows. Decoding one token writes one row in place. An update of `L > 1` tokens is exactly `L`
    updates of one: they are written behind the window, and `make_mask` hides from each token what would have given
    way by then. They move into the window before the next single token, or when the slack is full. So taking them
    back moves a counter.

    With a `policy`, which entries the window is to give up next is chosen anew every `block` tokens: a choice
    rearranges the rows,

        [0 : n_pin)            the best of all, the sink and the reserved ones among them
        [n_pin : n_keep)       the others, to be overwritten next, then the most recent ones

    and drops none: every token sees `n_keep` of them, and an entry goes only when a token is written over it. A choice
    is made between two updates, and sooner before one of more than `room` tokens. Of more than `block`, later
    tokens no longer see the entries that were to go next, and then the oldest; the next choice is among all of them.

    Args:
        keys, values: `(B, n_kv_heads, n_pin + n, head_dim)` entries in order of position, with `n <= n_window`,
            or their quantised parts.
        positions: uint32 `(B, n_kv_heads, n_pin)`, the original positions of the pinned entries.
        offset: position of the next token; the window's entries are the `n` tokens before it.
        n_window: entries the window may hold, at least 1.
        uniform: all layers of the model hold equally many entries. mlx-lm makes one mask for all of them, so if
            they don't, the tokens of one update all see the window as it was before it.
        quantization: how the entries given are quantised, and those to come will be.
        policy: whose scores decide what gives way; None is the oldest. If it votes, the attention class must be
            patched while tokens are fed.
        block: tokens between two choices, at most `n_window`; the `n_window - block` most recent always stay.
        n_sink: first entries, which always stay.
        reserved: bool `(B, n_kv_heads, n_pin)`, the pinned entries that no choice gives up.
        layer: the layer of the model, for what the policy asks.
        rotated: positions `(B, n_kv_heads, n)` and the others that those entries' keys are turned to, if there are any.

    Raises:
        SnapKVError: the shapes disagree, or `n_window < 1`.
    """

    ARRAYS = (*EvictingCache.ARRAYS, "_pinned_positions", "_reserved", "_left", "_rotated")
    COUNTS: ClassVar = {
        **EvictingCache.COUNTS, "n_window": 1, "n_sink": 0, "_since": 0, "_oldest": 0, "_newest": 0,
    }  # fmt: skip

    def __init__(
        self,
        keys: Stored,
        values: Stored,
        positions: mx.array,
        *,
        offset: int,
        n_window: int,
        uniform: bool = True,
        quantization: Quantization | None = None,
        policy: Policy | None = None,
        block: int = 1,
        n_sink: int = 0,
        reserved: mx.array | None = None,
        layer: Any = None,
        rotated: tuple[mx.array, mx.array] | None = None,
    ):
        n_pin, rows = positions.shape[-1], n_rows(keys)
        if n_window < 1:
            raise SnapKVError(f"n_window must be at least 1, got {n_window}")
        if not n_pin <= rows <= n_pin + n_window or n_rows(values) != rows:
            raise SnapKVError(
                f"{rows} keys and {n_rows(values)} values don't hold {n_pin} pinned entries "
                f"and a window of at most {n_window}"
            )
        if offset < rows:
            raise SnapKVError(f"offset must be at least the {rows} entries kept, got {offset}")
        super().__init__(newest=min(policy.obs_window, max(1, n_window // 2)) if policy else 0)
        self.keys, self.values = keys, values
        self.quantization = quantization
        self.policy, self.block, self.n_sink, self.layer = policy, block, n_sink, layer
        self.offset = offset
        self.n_pin = n_pin
        self.n_window = n_window
        self._pinned_positions = positions.astype(mx.uint32)
        self._reserved = reserved
        self._rotated = rotated
        self._left: mx.array | None = None  # positions of the window's entries at the last choice
        self._since = 0  # tokens since the last choice
        self._n = rows
        self._oldest = 0  # ring pointer: row n_pin + _oldest holds the window's oldest entry
        self._newest = 0  # tokens that can be taken back: of the last update, or since the mark
        self._tail: tuple[Stored, Stored] | None = None  # what was written last behind the window
        self.uniform = uniform

    def append(self, keys: Stored, values: Stored) -> None:
        L = n_rows(keys)
        if self.is_due(L):
            self.evict()
        elif self._flushes(L):
            self._flush()
            self._shrink(L)
        if L == 1 and self._n == self.n_keep and not self._marked:
            row = self.place()
        else:
            row = self._n
            self._n += L
            self._grow(max(self._n, self.n_keep))
            self._tail = join(self._tail, (keys, values)) if self._tail else (keys, values)
            self._count(L)
        write((self.keys, self.values), row, (keys, values))

    def place(self) -> int:
        if self._n < self.n_keep:
            row = self._n
            self._n += 1
        else:
            row = self.n_pin + self._oldest
            self._oldest = (self._oldest + 1) % self.n_window
        self._count(1)
        return row

    def _count(self, L: int) -> None:
        """Take note of the `L` tokens of an update."""
        self.offset += L
        self._since += L
        self._newest = self._newest + L if self._marked else L

    @property
    def n_keep(self) -> int:
        """Entries held when the window is full."""
        return self.n_pin + self.n_window

    @property
    def n_after_next(self) -> int:
        return min(self._n + 1, self.n_keep)

    def _grow(self, n: int) -> None:
        """Have room for `n` rows, and if they are more than the window's for some of slack."""
        more = max(n, self.n_keep + SLACK if n > self.n_keep else 0) - n_rows(self.keys)
        if more > 0:
            self.keys, self.values = grown((self.keys, self.values), more)

    def _shrink(self, L: int) -> None:
        """Give up the room of a longer update than the next one, of `L` tokens."""
        if n_rows(self.keys) > self.n_keep + max(SLACK, L):
            kept = rows((self.keys, self.values), 0, self.n_keep)
            self.keys, self.values = each(mx.contiguous, kept)

    def flush(self) -> None:
        self.commit()
        self._flush()
        self._shrink(1)

    def _flushes(self, L: int) -> bool:
        """Whether the pending tokens move into the window before an update of `L`: for one, or where slack ends."""
        full = L == 1 or self._n + L > self.n_keep + SLACK
        return not self._marked and (full or not self.uniform)

    def _flush(self) -> None:
        """Move the pending tokens into the window, over its oldest entries."""
        pending = self._n - self.n_keep
        if pending > 0:
            # Read from the buffers, they would be copied by the next write.
            tail = self._tail or self.keys_and_values()
            start = n_rows(tail) - pending
            for first, row, n in ring.pieces(pending, self.n_window, self._oldest):
                moved = rows(tail, start + first, start + first + n)
                write((self.keys, self.values), self.n_pin + row, moved)
            self._oldest = (self._oldest + pending) % self.n_window
            self._n = self.n_keep
            self._newest = 0
        self._tail = None

    def mark(self) -> None:
        if self.is_due(1):
            self.evict()
        super().mark()
        if self._n > self.n_keep + SLACK // 2:
            self._flush()
        self._newest = 0

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """The mask of the next update of `N` tokens: None, `"causal"`, or bool `(N, rows)`.

        With `p` pinned rows, a window of `w` and `m` entries kept behind the pinned ones, oldest first, token `i` sees
        the pinned ones and of the others, its own and later ones among them, those from `m + i - w + 1` to `m + i`.
        """
        if window_size is not None:
            raise SnapKVError("a layer with sliding-window attention can't use a compressed cache")
        p, w = self.n_pin, self.n_window
        m, oldest = self._n - p, self._oldest
        if self.is_due(N):
            m, oldest = min(m, w), 0
        elif self._flushes(N):
            m, oldest = min(m, w), (oldest + max(0, m - w)) % w
        all_seen = m + N <= w or (N == 1 and m == w and not self._marked)
        if all_seen or not (self.uniform or return_array):
            if N == 1:
                return None
            if not return_array:
                return "causal"
        if return_array:
            self._require_uniform()
        return mx.array(ring.visible(p, m, w, N, oldest))

    def hide(self, queries: mx.array, keys: Any, mask: Any) -> Any:
        """What the attention of the newest queries `(B, n_heads, L, head_dim)` is to be masked by, instead of `mask`.

        That one, of `make_mask`, is for all layers; where they hold different numbers of entries, it lets the tokens of
        an update see what earlier ones of it take the place of. A patched attention class asks here.
        """
        L = queries.shape[2]
        m = self._n - self.n_pin - L
        if self.uniform or m + L <= self.n_window:
            return mask
        return mx.array(ring.visible(self.n_pin, m, self.n_window, L, self._oldest))

    @property
    def room(self) -> float:
        """Tokens that fit in before the next choice."""
        if self.policy is None:
            return math.inf
        return max(self.block - self._since, self.n_keep - self._n)

    def is_due(self, L: int = 1) -> bool:
        many = self._n - self.n_pin > self.n_window - self.block
        return self.policy is not None and many and self._since > 0 and self.room < L

    def _evict(self) -> None:
        """Choose what the next tokens are written over."""
        assert self.policy is not None
        if self._since <= self.block:
            self._flush()  # as if the tokens had come one by one
        held = self._rows()
        order = mx.argsort(held.positions, axis=-1)
        entries = held.taken(order)
        entries.observed = self._observed(self.newest or 0)
        entries.budget, entries.n_window = self.n_keep - self.block, self.n_window
        scores = self.policy.score(entries)
        reserved = self._reserved
        if reserved is not None:
            reserved = mx.pad(reserved, [(0, 0), (0, 0), (0, self._n - self.n_pin)])
            reserved = mx.take_along_axis(reserved, order, axis=-1)
            scores = mx.where(reserved, mx.inf, scores)
        recent = self.n_window - self.block
        layout = ring.layout(scores, self.n_pin, self.n_keep, recent, self.n_sink)
        moved = held.taken(mx.take_along_axis(order, layout, axis=-1))
        if reserved is not None:
            best = layout[..., : self.n_pin]
            self._reserved = mx.take_along_axis(reserved, best, axis=-1)
        self.keys, self.values = moved.stored_keys, moved.stored_values
        self._pinned_positions = mx.contiguous(moved.positions[..., : self.n_pin])
        self._left = mx.contiguous(moved.positions[..., self.n_pin :])
        self._n, self._oldest, self._since, self._newest = layout.shape[-1], 0, 0, 0
        self._tail = None

    def _n_free(self) -> int:
        return self._newest

    def _roll_back(self, n: int) -> None:
        pending = self._n - self.n_keep
        if n > max(0, pending) and self._oldest:
            self._lay_out()  # the last token, alone, has overwritten the oldest
        if self._tail is not None:
            left = n_rows(self._tail) - n
            self._tail = rows(self._tail, 0, left) if left > 0 else None
        self._n -= n
        self.offset -= n
        self._since -= n
        self._newest -= n

    def _lay_out(self) -> None:
        """Turn the ring so that its oldest entry comes first."""
        turned = mx.arange(self.n_window) + self._oldest
        order = mx.concatenate([mx.arange(self.n_pin), self.n_pin + turned % self.n_window])
        stored = self.keys, self.values
        self.keys, self.values = each(lambda x: mx.take(x, order, axis=2), stored)
        self._oldest = 0

    @property
    def positions(self) -> mx.array:
        n = self._n - self.n_pin
        m = min(n, self.n_window)
        age = mx.concatenate([(mx.arange(m) - self._oldest) % max(m, 1), mx.arange(m, n)])
        window = mx.take(self._window_positions(n), age, axis=-1)
        return mx.concatenate([self._pinned_positions, window], axis=-1)

    @property
    def rotations(self) -> mx.array | None:
        return None if self._rotated is None else looked_up(self.positions, *self._rotated)

    def _window_positions(self, n: int) -> mx.array:
        """uint32 `(B, n_kv_heads, n)`: positions of the entries behind the pinned ones, the next to go first."""
        new = n if self._left is None else min(n, self._since)
        newest = mx.arange(self.offset - new, self.offset, dtype=mx.uint32)
        newest = mx.broadcast_to(newest, (*self._pinned_positions.shape[:2], new))
        if self._left is None:
            return newest
        left = self._left[..., self._left.shape[-1] - (n - new) :]
        return mx.concatenate([left, newest], axis=-1)

    def held(self, n_queries: int = 0) -> Entries:
        held = self._rows()
        entries = held.taken(mx.argsort(held.positions, axis=-1))
        entries.observed = self._observed(n_queries)
        return entries

    @property
    def state(self) -> tuple:
        """Arrays, numbers, strings and None only, as `save_prompt_cache` wants it, the queries among them."""
        keys, values = self.keys_and_values()
        return keys, values, *super().state[2:]

    @state.setter
    def state(self, v: Sequence) -> None:
        SavedState.state.fset(self, v)  # type: ignore[attr-defined]
        self.n_pin = self._pinned_positions.shape[-1]
        self._n, self._tail = n_rows(self.keys), None

    def _is_sound(self, like: Any) -> bool:
        heads, left = self._heads, self._left
        pinned = self._pinned_positions
        return (
            super()._is_sound(like)
            and pinned.shape == (*heads, self.n_pin)
            and is_per_entry(pinned, heads, self.n_pin, mx.uint32)
            and is_per_entry(self._reserved, heads, self.n_pin, mx.bool_)
            and self.block <= self.n_window
            and all(is_per_entry(x, heads, self.offset, mx.uint32) for x in self._rotated or ())
            and self.n_pin <= self._n <= self.offset
            and self._oldest < max(1, min(self._n - self.n_pin, self.n_window))
            and max(self._newest, self._stop) <= self.offset
            and is_per_entry(left, heads, self.offset, mx.uint32)
            and (left is None or left.shape[2] + self._since >= self._n - self.n_pin)
        )
