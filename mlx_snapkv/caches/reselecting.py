"""The decoding cache of a compressed prompt that chooses again, within its fixed shape, while it is decoded from."""

from __future__ import annotations

import mlx.core as mx

from ..entries.entries import Entries
from ..entries.quantization import Stored, each
from ..entries.selection import gather_rows
from ..models import AttentionFamily
from ..policies import Policy
from ..policies.budgets import Quota
from .self_evicting import SelfEvicting
from .window import SnapKVCache


class ReselectingSnapKVCache(SelfEvicting, SnapKVCache):
    """A `SnapKVCache` that chooses, every `block` tokens, which rows its window is to give up next.

        [0 : n_pin)            the best rows of all, the sink among them
        [n_pin : n_keep)       the others, to be overwritten next, then the most recent ones (a ring)

    Until the first choice it is a `SnapKVCache`. A choice rearranges the rows and drops none: every token sees
    `n_keep` of them, and a row goes only when a token is written over it. A choice is made between two
    updates, and sooner before one of more than `room` tokens. Of more than `block`, later ones no longer see the rows
    that were to go next, and then the oldest; the next choice is among all of them. `OneByOne` makes neither.

    Args:
        keys, values, positions, rest: as for `SnapKVCache`.
        policy: whose scores decide. If it votes, the attention class must be patched while tokens are fed.
        block: tokens between two choices, at most `n_window`; the `n_window - block` most recent rows always stay.
        n_sink: first rows, which always stay.
        family: the layer's attention family, for policies that vote.
    """

    def __init__(
        self,
        keys: Stored,
        values: Stored,
        positions: mx.array,
        *,
        policy: Policy,
        block: int,
        n_sink: int,
        family: AttentionFamily | None = None,
        **rest,
    ):
        SnapKVCache.__init__(self, keys, values, positions, **rest)
        self.start_recording(newest=policy.obs_window)
        self.policy = policy
        self.block = block
        self.n_sink = n_sink
        self._family = family
        self._since = 0  # tokens since the last choice
        self._left: mx.array | None = None  # positions of the window's rows at the last choice

    @property
    def room(self) -> int:
        """Tokens that fit in before the next choice."""
        return max(self.block - self._since, self.n_window - self._window_rows())

    @property
    def next_row(self) -> int | None:
        return None if self._must_evict(1) else super().next_row

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Stored, Stored]:
        """Add `(B, n_kv_heads, L, head_dim)` keys and values; the rows the attention is to see."""
        if self._must_evict(keys.shape[2]):
            self.evict()
        return super().update_and_fetch(keys, values)

    def _must_evict(self, L: int) -> bool:
        many = self._window_rows() > self.n_window - self.block
        return many and self._since > 0 and self.room < L

    def _added(self, L: int) -> None:
        super()._added(L)
        self._since += L

    def evict(self) -> None:
        """Choose now what the next tokens are written over."""
        if self._since <= self.block:
            self._keep_newest(self.n_window)  # as if the tokens had come one by one
        keys, values, positions = self.in_order()
        rows = Entries(keys, values, given_positions=positions, quantization=self.quantization)
        self._ask(rows, self.policy.obs_window)
        layout = self._layout(self.policy.score(rows))
        places = mx.take_along_axis(mx.argsort(self.positions, axis=-1), layout, axis=-1)
        positions = mx.take_along_axis(positions, layout, axis=-1)
        pinned, left = (
            mx.contiguous(x) for x in (positions[..., : self.n_pin], positions[..., self.n_pin :])
        )
        mx.eval(places, pinned, left)
        rows.release()
        del keys, values  # sorted copies
        moved = [
            each(lambda part: gather_rows(part, places), rows) for rows in (self.keys, self.values)
        ]
        mx.eval(moved)
        # At once, so that nothing that interrupts it leaves one without the other.
        vars(self).update(
            keys=moved[0],
            values=moved[1],
            _pinned_positions=pinned,
            _left=left,
            _oldest=0,
            _since=0,
        )

    def _layout(self, scores: mx.array) -> mx.array:
        """Which row goes where, by scores `(B, n_kv_heads, T)`: uint32 `(B, n_kv_heads, at most n_keep)`."""
        T = scores.shape[-1]
        n_keep = min(T, self.n_pin + self.n_window)
        recent = min(self.n_window - self.block, T - self.n_pin)
        n_best = self.n_pin + recent
        sink = min(self.n_sink, self.n_pin)
        best, all_kept = (Quota(n, sink, recent).select(scores) for n in (n_best, n_keep))
        row = mx.arange(T, dtype=mx.uint32)
        chance = mx.full(scores.shape, T, mx.uint32)
        chance = mx.put_along_axis(chance, all_kept, mx.take(row, all_kept), axis=-1)
        chance = mx.put_along_axis(chance, best, mx.array(T, mx.uint32), axis=-1)
        others = mx.sort(chance, axis=-1)[..., : n_keep - n_best]
        return mx.concatenate([best[..., : self.n_pin], others, best[..., self.n_pin :]], axis=-1)

    def _window_positions(self) -> mx.array:
        if self._left is None:
            return super()._window_positions()
        n = self._window_rows()
        new = min(n, self._since)
        left = self._left[..., self._left.shape[-1] - (n - new) :]
        newest = mx.arange(self.offset - new, self.offset, dtype=mx.uint32)
        return mx.concatenate([left, mx.broadcast_to(newest, (*left.shape[:2], new))], axis=-1)

    def in_order(self) -> tuple[Stored, Stored, mx.array]:
        """Keys, values and positions of all rows, in order of position; the cache stays as it is."""
        positions = self.positions
        order = mx.argsort(positions, axis=-1)
        keys, values = (
            each(lambda part: gather_rows(part, order), rows) for rows in (self.keys, self.values)
        )
        return keys, values, mx.take_along_axis(positions, order, axis=-1)

    def trim(self, n: int) -> int:
        """Take back the newest `n` tokens, exactly.

        Raises:
            TrimError: `n` is more than the last update added, so evicted rows would be missing.
        """
        if self._before is not None and n > self._trimmable:
            return self._trim_behind_eviction(n)
        super().trim(n)
        self._since -= n
        return n

    @property
    def state(self) -> tuple:
        """Arrays, numbers, strings and None only, as `save_prompt_cache` wants it, the queries among them."""
        return (
            *super().state,
            *(getattr(self, name) for name in _STATE),
            *self._choice_state(),
        )

    @state.setter
    def state(self, v) -> None:
        n = len(v) - len(_STATE) - 3
        *plain, policy, scale, queries = v[n:]
        SnapKVCache.state.fset(self, v[:n])  # type: ignore[attr-defined]
        self.start_recording()
        for name, value in zip(_STATE, plain, strict=True):
            setattr(self, name, value)
        self._take_choice_state(policy, scale, queries)


_STATE = ("block", "n_sink", "_since", "_left", "newest", "sinks", "_stop")
