"""One buffer with all entries that a token of a sparse answer reads."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from ..entries.quantization import grown, join, n_rows, rows, write
from .compiled import compiled
from .residual import Residual

Pair = tuple[mx.array, mx.array]  # keys and values `(B, n_kv_heads, n, head_dim)`


class Gathered:
    """Keys and values that a token reads: cluster means, entries chosen for it, and entries that every token reads.

        [0 : n_means)              means
        [n_means : n_before)       chosen for the latest token
        [n_before : n_before + n)  read by every token, in the order of arrival

    Chosen entries overwrite those of the token before. Joining the three parts for every token would take fresh
    memory, which the system clears first: that can take longer than the attention.
    """

    keys: Any = None  # buffers `(B, n_kv_heads, n_rows, head_dim)`; None before the first `append`
    values: Any = None

    def __init__(self) -> None:
        self.n = 0  # entries that every token reads
        self._n_before = 0
        self._residual: Residual | None = None  # its means are in the buffers

    def append(self, keys: mx.array, values: mx.array) -> None:
        """Add entries that every token reads."""
        new = keys.shape[2]
        end = self._n_before + self.n
        if self.keys is None or end + new > n_rows(self.keys):
            buffers: Any = (keys, values) if self.keys is None else (self.keys, self.values)
            more = -(-new // KVCache.step) * KVCache.step
            self.keys, self.values = grown(rows(buffers, 0, end), more)
        write((self.keys, self.values), end, (keys, values))
        self.n += new

    def remove(self, start: int, n: int) -> None:
        """Drop `n` entries that every token reads, from number `start` on, and all chosen ones."""
        always = self.always()
        self._rebuild(join(rows(always, 0, start), rows(always, start + n, self.n)))

    def always(self) -> Pair:
        """Return the keys and values that every token reads."""
        return self._rows(self._n_before)

    def read(self, chosen: Pair, residual: Residual | None) -> Pair:
        """Return all keys and values that a token reads: the residual's means, `chosen`, and the always read ones."""
        n_means = 0 if residual is None else residual.clusters.n
        if residual is self._residual and n_means + n_rows(chosen) == self._n_before:
            self.keys, self.values = _written((self.keys, self.values), n_means, chosen)
        else:
            self._rebuild(self.always(), chosen, residual)
        return self._rows(0)

    def _rebuild(self, always: Any, chosen: Any = None, residual: Residual | None = None) -> None:
        """Make new buffers of these parts, with free rows at the end for more entries that every token reads."""
        means: Any = None
        if residual is not None:
            of_clusters = residual.clusters.keys, residual.clusters.values
            means = tuple(x.astype(y.dtype) for x, y in zip(of_clusters, always))
        before = [x for x in (means, chosen) if x is not None]
        self.keys, self.values = grown(join(*before, always), KVCache.step)
        self._residual = residual
        self._n_before = sum(map(n_rows, before))
        self.n = n_rows(always)

    def _rows(self, start: int) -> Pair:
        keys, values = rows((self.keys, self.values), start, self._n_before + self.n)
        return keys, values  # type: ignore[return-value]


@compiled
def _written(buffers: Pair, start: int, chosen: Pair) -> Pair:
    """Write chosen keys and values into the buffers from row `start` on, and return the buffers."""
    write(buffers, start, chosen)
    return buffers
