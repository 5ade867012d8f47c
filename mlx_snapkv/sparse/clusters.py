"""Clusters of a layer's entries: of those with similar keys, wherever they stand, one mean key and one mean value.

K-means (Lloyd, 1982, "Least squares quantization in PCM") of every block of entries for itself, from keys evenly apart
and in few rounds: more rounds, smaller clusters or larger blocks bring an answer no nearer to the full cache's. Of an
answer 256 entries come at a time, which are one cluster.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx

from ..entries.quantization import join, rows
from ..entries.spans import BLOCK_SIZE, spans
from .selection import counted

CLUSTER_SIZE = 256  # entries of a cluster, on average
CLUSTERS_PER_BLOCK = BLOCK_SIZE // CLUSTER_SIZE  # clusters of a whole block
K_MEANS_ROUNDS = 2
ONE = mx.array(1)


class Clusters(NamedTuple):
    """The clusters of a layer's first entries.

    Attributes:
        ids: which cluster each entry is in, uint16 `(B, n_kv_heads, n)`; that will do for 16 million entries.
        keys: mean keys, `(B, n_kv_heads, n_clusters, head_dim)`.
        values: mean values.
    """

    ids: mx.array
    keys: mx.array
    values: mx.array

    @property
    def n(self) -> int:
        return self.keys.shape[2]

    @property
    def n_entries(self) -> int:
        return self.ids.shape[2]

    def whole_blocks(self) -> WholeBlocks | None:
        """Those of whole blocks, which stay when more entries come; None if there are none."""
        if (n := self.n_entries // BLOCK_SIZE) == 0:
            return None
        ids = (self.ids[:, :, : n * BLOCK_SIZE] % CLUSTERS_PER_BLOCK).astype(mx.uint8)
        mx.eval(ids)
        return WholeBlocks(ids, *rows((self.keys, self.values), 0, n * CLUSTERS_PER_BLOCK))

    def followed_by(self, other: Clusters) -> Clusters:
        """With those of the entries behind."""
        return _joined([self, other])

    def sizes(self, places: mx.array) -> mx.array:
        """How many of uint32 `places` `(B, n_kv_heads, k)` are in each cluster, int32 `(B, n_kv_heads, n_clusters)`."""
        return _sizes(self.n, self.ids, places)

    def sizes_between(self, start: int, stop: int) -> mx.array:
        """The same of the entries `[start, stop)`, evaluated."""
        sizes = _sums(self.n, self.ids[:, :, start:stop], ONE)
        mx.eval(sizes)
        return sizes

    def sizes_where(self, flags: mx.array) -> mx.array:
        """How many of bool `(B, n_kv_heads, m, n)` are true in each cluster, int32 `(B, n_kv_heads, m, n_clusters)`."""
        found = []
        for i in range(flags.shape[2]):
            found.append(_sums(self.n, self.ids, flags[:, :, i].astype(mx.int32)))
            mx.eval(found[-1])
        return mx.stack(found, axis=2)


@dataclass(frozen=True)
class WholeBlocks:
    """Clusters of a layer's first blocks, as they are held between turns: ids count within a block and take one byte.

    Attributes:
        ids: uint8 `(B, n_kv_heads, n)`; means are those of `Clusters`.
    """

    ids: mx.array
    keys: mx.array
    values: mx.array

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.keys.nbytes + self.values.nbytes

    @property
    def n_entries(self) -> int:
        return self.ids.shape[2]

    def of_first(self, n: int) -> WholeBlocks | None:
        """Those among the first `n` entries."""
        if n >= self.n_entries:
            return self
        if (n := n // BLOCK_SIZE) == 0:
            return None
        return WholeBlocks(
            self.ids[:, :, : n * BLOCK_SIZE],
            *rows((self.keys, self.values), 0, n * CLUSTERS_PER_BLOCK),
        )

    def clusters(self) -> Clusters:
        first = (mx.arange(self.n_entries) // BLOCK_SIZE * CLUSTERS_PER_BLOCK).astype(mx.uint16)
        return Clusters(self.ids + first, self.keys, self.values)


def _joined(parts: list[Clusters]) -> Clusters:
    """Those of entries that follow each other."""
    ids, n = [], 0
    for part in parts:
        ids.append(part.ids + n)
        n += part.n
    keys, values = join(*((part.keys, part.values) for part in parts))
    joined = Clusters(mx.concatenate(ids, axis=2), keys, values)
    mx.eval(joined.ids, keys, values)
    return joined


def _sizes(n: int, ids: mx.array, places: mx.array) -> mx.array:
    return _sums(n, mx.take_along_axis(ids, places, axis=-1), ONE)


def _sums(n: int, ids: mx.array, counts: mx.array) -> mx.array:
    """The sums of int32 counts by cluster, whose ids `(B, n_kv_heads, m)` tell to which each belongs."""
    B, H, _ = ids.shape
    bins = ids + counted(B * H, n).reshape(B, H, 1)
    sums = _zeros(B * H * n).at[bins.flatten()].add(mx.broadcast_to(counts, bins.shape).flatten())
    return sums.reshape(B, H, n)


@lru_cache(64)
def _zeros(n: int) -> mx.array:
    """A decoded token needs them again and again."""
    found = mx.zeros(n, mx.int32)
    mx.eval(found)
    return found


def clusters_of(entries: Any, start: int = 0) -> Clusters:
    """Those of the entries from `start` on, which are read a block at a time.

    Args:
        entries: they give keys and values `(B, n_kv_heads, stop - first, head_dim)` by `read_keys(first, stop)` and
            `read_values`.
    """
    found = []
    for first, stop in spans(start, len(entries)):
        n = -(-(stop - first) // CLUSTER_SIZE)
        ids, keys = k_means(entries.read_keys(first, stop), n)
        mx.eval(keys)  # before the values are read, perhaps from a file
        values = mean_by_cluster(entries.read_values(first, stop), ids, n)
        mx.eval(values)
        found.append(Clusters(ids, keys, values))
    return _joined(found)


def k_means(keys: mx.array, n: int) -> tuple[mx.array, mx.array]:
    """Which of `n` clusters each of the keys `(B, n_kv_heads, m, head_dim)` is in, uint16 `(B, n_kv_heads, m)`, and the
    means `(B, n_kv_heads, n, head_dim)`."""
    if n == 1:
        ids = mx.zeros(keys.shape[:3], mx.uint16)
        return ids, mean_by_cluster(keys, ids, n)
    apart = mx.linspace(0, keys.shape[2] - 1, n + 2)[1:-1].astype(mx.int32)
    means = keys[:, :, apart]
    for _ in range(K_MEANS_ROUNDS):
        ids = _nearest(keys.astype(mx.float32), means.astype(mx.float32))
        mx.eval(ids)  # with the memory of one round
        means = mean_by_cluster(keys, ids, n)
    return ids, means


def mean_by_cluster(entries: mx.array, ids: mx.array, n: int) -> mx.array:
    """The means of `(B, n_kv_heads, m, head_dim)` by cluster, `(B, n_kv_heads, n, head_dim)`; 0 of an empty one.

    They are summed in float32: of float16, sums of a few hundred numbers may be too large.
    """
    members = (ids[:, :, None] == mx.arange(n, dtype=ids.dtype)[:, None]).astype(mx.float32)
    sums, sizes = members @ entries.astype(mx.float32), members.sum(axis=-1, keepdims=True)
    return (sums / mx.maximum(sizes, 1)).astype(entries.dtype)


def _nearest(keys: mx.array, centres: mx.array) -> mx.array:
    # The squared distance, but for the key's own square, which is the same to all centres.
    distances = mx.square(centres).sum(axis=-1)[:, :, None] + keys @ (-2 * centres).mT
    return mx.argmin(distances, axis=-1).astype(mx.uint16)
