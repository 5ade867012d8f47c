"""The decoding cache of a compressed prompt: pinned entries, and those of the newest tokens."""

import mlx.core as mx
import numpy as np

from ..caches.contract import loadable
from ..entries.entries import Entries
from ..entries.quantization import Quantization, Stored, each, grown, n_rows, rows, with_room, write
from ..entries.quota import UNLIMITED
from ..errors import SnapKVError
from .evicting import EvictingCache

SLACK = 16  # rows behind the window, once several tokens have come at a time


@loadable
class SnapKVCache(EvictingCache):
    """A KV cache of pinned entries and a recent window, which grows with the answer or slides over it.

        [0 : n_pin)            pinned: sink and voted middle
        [n_pin : n_keep)       recent window; once it is full, a decoded token overwrites the oldest row (a ring)
        [n_keep : )            pending: tokens that came several at a time

    A window without a limit is never full: every decoded token is written behind the last, and an update costs what one
    of mlx-lm's `KVCache` does. One that slides has a constant shape from the first decoded token to the last.

    Keys keep the rotation of their original position; `offset` is the logical position of the next token. An update of
    `L > 1` tokens equals `L` updates of one: `make_mask` hides from each token what would be overwritten by then.
    Pending tokens move into the window before the next update.

    Raises: SnapKVError: the shapes disagree, or `n_window < 1`.
    """

    TRANSIENT = EvictingCache.TRANSIENT | {"is_drafted"}

    is_drafted = False  # mlx-lm's speculative decoding goes on from here, and trims the drafts that it rejects

    def __init__(
        self,
        keys: Stored,  # `(B, n_kv_heads, n_pin + n, head_dim)` in order of position, `n <= n_window`, or parts
        values: Stored,
        positions: mx.array,  # uint32 `(B, n_kv_heads, n_pin)`, the original positions of the pinned entries
        *,
        offset: int,  # position of the next token; the window's entries are the `n` tokens before it
        n_window: int | None,  # entries the window may hold, at least 1; None: it grows
        quantization: Quantization | None = None,  # of the entries given, and of those to come
    ):
        n_window = UNLIMITED if n_window is None else n_window
        n_pin, n = positions.shape[-1], n_rows(keys)
        if n_window < 1 or not n_pin <= n == n_rows(values) <= min(offset, n_pin + n_window):
            raise SnapKVError(
                f"{n} keys and {n_rows(values)} values of {offset} tokens don't hold {n_pin} pinned entries "
                f"and a window of at most {n_window}, at least 1"
            )
        super().__init__(newest=0)
        self.keys, self.values, self.quantization = keys, values, quantization
        self.offset, self.n_pin, self.n_window = offset, n_pin, n_window
        self._pinned = positions.astype(mx.uint32)
        self._n = n
        self._oldest = 0  # ring pointer: row n_pin + _oldest holds the window's oldest entry

    def append(self, keys: Stored, values: Stored) -> None:
        L = n_rows(keys)
        self._flush()
        self._shrink(L)
        if L == 1 and self._n == self.n_keep:
            row = self.place()
        else:
            row = self._n
            self._n += L
            self._make_room()
            self.offset += L
        write((self.keys, self.values), row, (keys, values))

    def _make_room(self) -> None:
        """Have rows for all entries: a window that slides has all of its own at once."""
        n, held = self._n, n_rows(self.keys)
        if self.grows:
            most = held if n <= held else with_room(n)
        else:
            most = self.n_keep if n <= self.n_keep else max(n, self.n_keep + SLACK)
        if most > held:
            self.keys, self.values = grown((self.keys, self.values), most - held)

    def place(self) -> int:
        if self._n < self.n_keep:
            row = self._n
            self._n += 1
        else:
            row = self.n_pin + self._oldest
            self._oldest = (self._oldest + 1) % self.n_window
        self.offset += 1
        return row

    @property
    def grows(self) -> bool:  # type: ignore[override]
        """Whether the window has no limit: nothing is ever overwritten."""
        return self.n_window >= UNLIMITED

    @property
    def n_keep(self) -> int:
        return self.n_pin + self.n_window

    @property
    def n_after_next(self) -> int:
        return min(self._n + 1, self.n_keep)

    def _shrink(self, L: int) -> None:
        """Free the rows of an update that was longer than the next one, of `L` tokens."""
        if n_rows(self.keys) > self.n_keep + max(SLACK, L):
            kept = rows((self.keys, self.values), 0, self.n_keep)
            self.keys, self.values = each(mx.contiguous, kept)

    def flush(self) -> None:
        self._flush()
        self._shrink(1)

    def _flush(self) -> None:
        """Write the pending tokens over the window's oldest entries."""
        pending = self._n - self.n_keep
        if pending > 0:
            self._oldest = (self._oldest + pending) % self.n_window
            moved = min(pending, self.n_window)
            places = self.n_pin + mx.arange(self._oldest - moved, self._oldest) % self.n_window
            newest = rows((self.keys, self.values), self._n - moved, self._n)
            write((self.keys, self.values), places, newest)
            self._n = self.n_keep

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """None, `"causal"`, or bool `(N, rows)`; see `visible`."""
        if window_size is not None:
            raise SnapKVError("a layer with sliding-window attention can't use a compressed cache")
        p, w = self.n_pin, self.n_window
        pending = max(0, self._n - self.n_keep)
        m, oldest = self._n - p - pending, (self._oldest + pending) % w
        all_seen = m + N <= w or (N == 1 and m == w)
        if all_seen and (N == 1 or not return_array):
            return None if N == 1 else "causal"
        return visible(p, m, w, N, oldest)

    def is_trimmable(self) -> bool:
        """True for mlx-lm's speculative decoding alone, which trims no more than it has fed."""
        return self.is_drafted and self.grows

    def trim(self, n: int) -> int:  # type: ignore[override]
        """Drop the newest `n` tokens of a window that grows, or as many as came since the compression."""
        n = min(n, self._n - self.n_pin)
        self._n -= n
        self.offset -= n
        return n

    @property
    def positions(self) -> mx.array:  # type: ignore[override]
        n = self._n - self.n_pin
        m = min(n, self.n_window)
        age = mx.concatenate([(mx.arange(m) - self._oldest) % max(m, 1), mx.arange(m, n)])
        window = (age + (self.offset - n)).astype(mx.uint32)
        window = mx.broadcast_to(window, (*self._pinned.shape[:2], n))
        return mx.concatenate([self._pinned, window], axis=-1)

    def held(self, n_queries: int = 0) -> Entries:
        held = self._rows()
        entries = held.taken(mx.argsort(held.positions, axis=-1))
        entries.observed = self._observed(n_queries)
        return entries


def visible(n_pin: int, held: int, n_window: int, N: int, oldest: int) -> mx.array:
    """What each of `N` tokens sees, bool `(N, n_pin + held + N)`: the pinned, and the last `n_window` up to its own.

    Args:
        held: entries behind the pinned ones: a ring of at most `n_window`, its oldest at `oldest`, then the pending.
    """
    age = np.arange(-n_pin, held + N)  # by row; in the ring, which turns, counted from its oldest
    ring = slice(n_pin, n_pin + min(held, n_window))
    age[ring] = (age[ring] - oldest) % min(max(held, 1), n_window)
    newest = held + np.arange(N)[:, None]
    pinned = np.arange(n_pin + held + N) < n_pin
    return mx.array(pinned | ((newest - n_window < age) & (age <= newest)))
