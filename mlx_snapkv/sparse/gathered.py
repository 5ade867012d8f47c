"""What a token reads of entries that lie elsewhere, in one buffer."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..entries.quantization import grown, join, n_rows, rows, write
from .compiled import compiled
from .residual import Rest

Pair = tuple[mx.array, mx.array]  # keys and values `(B, n_kv_heads, n, head_dim)`


class Gathered:
    """Keys and values that a token reads: means, entries chosen for it, and those that every token reads.

        [0 : n_means)              means
        [n_means : n_before)       chosen for the latest token
        [n_before : n_before + n)  read by every token, in the order they came

    What is chosen is written over what the token before has read. Joined for every token, they would take fresh memory
    of their size, whose pages the system clears first: that can take longer than the attention.
    """

    keys: Any = None  # the buffers; None while nothing was added
    values: Any = None

    def __init__(self) -> None:
        self.n = 0  # entries that every token reads
        self._n_before = 0
        self._rest: Rest | None = None  # whose means are held

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add entries that every token reads."""
        new, end = keys.shape[2], self._n_before + self.n
        if self.keys is None or end + new > n_rows(self.keys):
            held: Any = (keys, values) if self.keys is None else (self.keys, self.values)
            more = -(-new // KVCache.step) * KVCache.step
            self.keys, self.values = grown(rows(held, 0, end), more)
        write((self.keys, self.values), end, (keys, values))
        self.n += new

    def remove(self, start: int, n: int) -> None:
        """Drop `n` of those from the one at `start` on; what was chosen is gone, too."""
        held = self.always()
        parts = rows(held, 0, start), rows(held, start + n, self.n)
        self._hold(join(*parts))

    def always(self) -> Pair:
        """Those that every token reads."""
        return self._rows(self._n_before)

    def read(self, chosen: Pair, rest: Rest | None) -> Pair:
        """What a token reads that has chosen these, with the means of the rest, if there are any."""
        n_means = 0 if rest is None else rest.clusters.n
        if rest is self._rest and n_means + n_rows(chosen) == self._n_before:
            self.keys, self.values = _written((self.keys, self.values), n_means, chosen)
        else:
            self._hold(self.always(), chosen, rest)
        return self._rows(0)

    def _hold(self, always: Any, chosen: Any = None, rest: Rest | None = None) -> None:
        """Hold these in buffers made for them, with room for more of those that every token reads."""
        means: Any = None
        if rest is not None:
            held = rest.clusters.keys, rest.clusters.values
            means = tuple(x.astype(y.dtype) for x, y in zip(held, always))
        before = [x for x in (means, chosen) if x is not None]
        self.keys, self.values = grown(join(*before, always), KVCache.step)
        self._rest, self._n_before, self.n = rest, sum(map(n_rows, before)), n_rows(always)

    def _rows(self, start: int) -> Pair:
        keys, values = rows((self.keys, self.values), start, self._n_before + self.n)
        return keys, values  # type: ignore[return-value]


@compiled
def _written(held: Pair, start: int, chosen: Pair) -> Pair:
    """Buffers with what was chosen from row `start` on."""
    write(held, start, chosen)
    return held
