"""The decoding cache of a compressed prompt."""

from __future__ import annotations

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache

from ..entries.quantization import Quantization, Stored, each, join, n_bytes, n_rows, pack, write
from ..errors import SnapKVError, TrimError


class SnapKVCache(mlx_cache._BaseCache):
    """A KV cache of fixed shape: rows that stay for good, and a recent window that slides.

        [0 : n_pin)            pinned: sink and voted middle, never evicted
        [n_pin : n_keep)       recent window; a decoded token overwrites the oldest row (a ring)

    Keys keep the rotation of their original position; `offset` is the logical position of the next
    token, whatever the number of rows. Decoding one token writes one row in place. An update of `L > 1`
    tokens (a follow-up turn, a speculative check) is exactly `L` updates of one: the rows are laid out in
    order, `[pinned | newest n_window - 1 | L new]`, and `make_mask` hides from each token what would have
    been evicted by then. Rows over the window are dropped at the start of the next update, so the tokens
    of the last one can be trimmed again exactly.

    Args:
        keys, values: `(B, n_kv_heads, n_pin + n, head_dim)` rows in order of position, with `n <= n_window`,
            or their quantised parts.
        positions: uint32 `(B, n_kv_heads, n_pin)`, the original positions of the pinned rows.
        offset: position of the next token; the window's rows are the `n` tokens before it.
        n_window: rows the window may hold, at least 1.
        uniform: all layers of the model hold equally many rows. mlx-lm makes one mask for all of them, so if
            they don't, the tokens of one update all see the window as it was before it.

    Raises:
        SnapKVError: the shapes disagree, or `n_window < 1`.
    """

    quantization: Quantization | None = None

    def __init__(
        self,
        keys: Stored,
        values: Stored,
        positions: mx.array,
        *,
        offset: int,
        n_window: int,
        uniform: bool = True,
    ):
        n_pin, rows = positions.shape[-1], n_rows(keys)
        if n_window < 1:
            raise SnapKVError(f"n_window must be at least 1, got {n_window}")
        if not n_pin <= rows <= n_pin + n_window or n_rows(values) != rows:
            raise SnapKVError(
                f"{rows} keys and {n_rows(values)} values don't hold {n_pin} pinned rows "
                f"and a window of at most {n_window}"
            )
        if offset < rows:
            raise SnapKVError(f"offset must be at least the {rows} rows kept, got {offset}")
        self.keys = keys
        self.values = values
        self._pinned_positions = positions.astype(mx.uint32)
        self.offset = offset
        self.n_pin = n_pin
        self.n_window = n_window
        self._oldest = 0  # ring pointer: row n_pin + _oldest holds the window's oldest token
        self._trimmable = 0  # tokens of the last update that can still be taken back
        self._uniform = uniform

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Stored, Stored]:
        """Add `(B, n_kv_heads, L, head_dim)` keys and values; the rows the attention is to see."""
        L = keys.shape[2]
        row = self.next_row
        keys, values = pack(keys, self.quantization), pack(values, self.quantization)
        if L == 1 and row is not None:
            write(self.keys, row, keys)
            write(self.values, row, values)
            self.take_step(self.keys, self.values)
        else:
            self._keep_newest(self.n_window - 1)
            self.keys, self.values = join(self.keys, keys), join(self.values, values)
            self._added(L)
        return self.keys, self.values

    @property
    def next_row(self) -> int | None:
        """The row that one more token overwrites; None unless the window is exactly full."""
        return self.n_pin + self._oldest if self._window_rows() == self.n_window else None

    def take_step(self, keys: Stored, values: Stored) -> None:
        """Go on with rows in which one more token was written over `next_row`."""
        self.keys = keys
        self.values = values
        self._oldest = (self._oldest + 1) % self.n_window
        self._added(1)

    def _added(self, L: int) -> None:
        self.offset += L
        self._trimmable = L

    def make_mask(self, N: int, return_array: bool = False, window_size: int | None = None):
        """The mask of the next update of `N` tokens: None, `"causal"`, or bool `(N, rows)`.

        With `p` pinned rows, a window of `w` and `m` rows kept in it, token `i` sees the rows `r < p` and
        `p + m + i - w < r <= p + m + i`.
        """
        if window_size is not None:
            raise SnapKVError("a layer with sliding-window attention can't use a compressed cache")
        if N == 1:
            return None
        p, w = self.n_pin, self.n_window
        m = min(self._window_rows(), w - 1)
        if (m + N <= w or not self._uniform) and not return_array:
            return "causal"
        newest = p + m + mx.arange(N)[:, None]
        rows = mx.arange(p + m + N)[None]
        return (rows < p) | ((newest - w < rows) & (rows <= newest))

    def _window_rows(self) -> int:
        return self.size() - self.n_pin

    def _keep_newest(self, n: int, *, before: int = 0) -> None:
        """Lay the rows out in order: the pinned ones, then the newest `n` that precede the last `before`."""
        have = self._window_rows()
        stop = have - before
        start = max(0, stop - n)
        if self._oldest == 0 and start == 0 and before == 0:
            return
        pieces = _ring_slices(start, stop, self._oldest, have)
        self.keys = _take(self.keys, self.n_pin, pieces)
        self.values = _take(self.values, self.n_pin, pieces)
        self._oldest = 0

    @property
    def positions(self) -> mx.array:
        """uint32 `(B, n_kv_heads, n_keep)`: the original position of every physical row."""
        n = self._window_rows()
        age = (mx.arange(n) - self._oldest) % max(n, 1)
        window = mx.take(self._window_positions(), age, axis=-1)
        return mx.concatenate([self._pinned_positions, window], axis=-1)

    def _window_positions(self) -> mx.array:
        """uint32 `(B, n_kv_heads, n)`: the original positions of the window's rows, the next to go first."""
        n = self._window_rows()
        positions = mx.arange(self.offset - n, self.offset, dtype=mx.uint32)
        return mx.broadcast_to(positions, (*self._pinned_positions.shape[:2], n))

    def keys_and_values(self) -> tuple[Stored, Stored]:
        return self.keys, self.values

    def in_order(self) -> tuple[Stored, Stored, mx.array]:
        """Keys, values and positions of all rows, in order of position; the cache stays as it is."""
        n = self._window_rows()
        pieces = _ring_slices(0, n, self._oldest, n)
        keys, values = (_take(rows, self.n_pin, pieces) for rows in (self.keys, self.values))
        return keys, values, mx.sort(self.positions, axis=-1)

    def size(self) -> int:
        """Rows held."""
        return n_rows(self.keys)

    def empty(self) -> bool:
        return self.keys is None

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values."""
        return n_bytes(self.keys) + n_bytes(self.values)

    def is_trimmable(self) -> bool:
        """True: every `trim` that returns is an exact rewind, any other raises."""
        return True

    def trim(self, n: int) -> int:
        """Take back the newest `n` tokens, exactly.

        Raises:
            TrimError: `n` is more than the last update added, so evicted rows would be missing.
        """
        if not 0 <= n <= self._trimmable:
            raise TrimError(
                f"a compressed cache can take back 0 to {self._trimmable} tokens, "
                f"those of its last update, not {n}"
            )
        if n > 0:
            self._keep_newest(self._window_rows(), before=n)
            self.offset -= n
            self._trimmable -= n
        return n

    @property
    def state(self) -> tuple:
        """Arrays and whole numbers only, as `save_prompt_cache` wants it."""
        return tuple(getattr(self, name) for name in _STATE)

    @state.setter
    def state(self, v) -> None:
        for name, value in zip(_STATE, v, strict=True):
            setattr(self, name, value)
        self.n_pin = self._pinned_positions.shape[-1]


_STATE = (
    "keys", "values", "_pinned_positions", "offset", "n_window", "_oldest", "_trimmable", "_uniform",
)  # fmt: skip


def _ring_slices(start: int, stop: int, oldest: int, size: int) -> list[tuple[int, int]]:
    """Logical window rows `[start, stop)` of a ring of `size` as physical slices, oldest first."""
    first, last = start + oldest, stop + oldest
    if last <= size:
        return [(first, last)]
    if first >= size:
        return [(first - size, last - size)]
    return [(first, size), (0, last - size)]


def _take(rows: Stored, n_pin: int, pieces: list[tuple[int, int]]) -> Stored:
    def taken(array: mx.array) -> mx.array:
        window = [array[..., n_pin + a : n_pin + b, :] for a, b in pieces]
        return mx.concatenate([array[..., :n_pin, :], *window], axis=2)

    return each(taken, rows)


def register(cls: type) -> None:
    """Make a class of ours known to mlx-lm's `load_prompt_cache`, which looks them up by name."""
    setattr(mlx_cache, cls.__name__, cls)
