"""Cluster entries with similar keys. Each cluster has a mean key and a mean value.

Each block of 8,192 entries is clustered separately with k-means (Lloyd, 1982, "Least squares quantization in PCM"),
starting from evenly spaced keys. More rounds, smaller clusters or larger blocks do not bring answers closer to those of
the full cache. An answer's entries are added 256 at a time, and form one cluster each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from ..entries.quantization import concatenate_rows, slice_rows
from ..entries.spans import BLOCK_SIZE, spans

# Average number of entries per cluster. If clusters were smaller, a token would read more means and therefore fewer
# entries (measured by scripts/measure_rest.py).
CLUSTER_SIZE = 256
CLUSTERS_PER_BLOCK = BLOCK_SIZE // CLUSTER_SIZE
K_MEANS_ROUNDS = 2  # more rounds take longer without changing answers
ONE = mx.array(1)


class Clusters(NamedTuple):
    """The clusters of a layer's first entries.

    Attributes:
        ids: cluster id of each entry, uint16 `(B, n_kv_heads, n)`, which is enough for 16 million entries.
        keys: mean keys, `(B, n_kv_heads, n_clusters, head_dim)`.
        values: mean values, of the same shape.
    """

    ids: mx.array
    keys: mx.array
    values: mx.array

    @property
    def n(self) -> int:
        """Return the number of clusters."""
        return self.keys.shape[2]

    @property
    def n_entries(self) -> int:
        """Return the number of entries in all clusters."""
        return self.ids.shape[2]

    def whole_blocks(self) -> WholeBlocks | None:
        """Return the clusters of complete blocks, which later entries won't change, or None if no block is complete."""
        if (n := self.n_entries // BLOCK_SIZE) == 0:
            return None
        ids = (self.ids[:, :, : n * BLOCK_SIZE] % CLUSTERS_PER_BLOCK).astype(mx.uint8)
        mx.async_eval(ids)
        return WholeBlocks(ids, *slice_rows((self.keys, self.values), 0, n * CLUSTERS_PER_BLOCK))

    def followed_by(self, other: Clusters) -> Clusters:
        """Return these clusters followed by those of the next entries."""
        return _join([self, other])

    def sizes(self, positions: mx.array) -> mx.array:
        """Count the entries at `positions` `(B, n_kv_heads, k)` by cluster: int32 `(B, n_kv_heads, n_clusters)`."""
        return _sums(self.n, mx.take_along_axis(self.ids, positions, axis=-1), ONE)

    def sizes_between(self, start: int, stop: int) -> mx.array:
        """Count the entries `[start, stop)` by cluster: int32 `(B, n_kv_heads, n_clusters)`."""
        sizes = _sums(self.n, self.ids[:, :, start:stop], ONE)
        mx.async_eval(sizes)
        return sizes

    def sizes_where(self, flags: mx.array) -> mx.array:
        """Count true flags `(B, n_kv_heads, m, n)` by cluster: int32 `(B, n_kv_heads, m, n_clusters)`."""
        counts = []
        for i in range(flags.shape[2]):
            counts.append(_sums(self.n, self.ids, flags[:, :, i].astype(mx.int32)))
            mx.async_eval(counts[-1])
        return mx.stack(counts, axis=2)


@dataclass(frozen=True)
class WholeBlocks:
    """Clusters of a layer's first complete blocks, stored between turns.

    Attributes:
        ids: cluster id of each entry within its block, uint8 `(B, n_kv_heads, n)`.
        keys: mean keys, as in `Clusters`.
        values: mean values, as in `Clusters`.
    """

    ids: mx.array
    keys: mx.array
    values: mx.array

    @property
    def nbytes(self) -> int:
        """Return the size in bytes of ids and means."""
        return self.ids.nbytes + self.keys.nbytes + self.values.nbytes

    @property
    def n_entries(self) -> int:
        """Return the number of entries in all blocks."""
        return self.ids.shape[2]

    def of_first(self, n: int) -> WholeBlocks | None:
        """Return the clusters of the complete blocks in the first `n` entries, or None if no block is complete."""
        if n >= self.n_entries:
            return self
        if (n := n // BLOCK_SIZE) == 0:
            return None
        return WholeBlocks(
            self.ids[:, :, : n * BLOCK_SIZE],
            *slice_rows((self.keys, self.values), 0, n * CLUSTERS_PER_BLOCK),
        )

    def clusters(self) -> Clusters:
        """Convert to `Clusters`, whose ids are unique across blocks."""
        first = (mx.arange(self.n_entries) // BLOCK_SIZE * CLUSTERS_PER_BLOCK).astype(mx.uint16)
        # Non-contiguous means would be copied by the GPU kernels for every token.
        return Clusters(self.ids + first, mx.contiguous(self.keys), mx.contiguous(self.values))


def _join(parts: list[Clusters]) -> Clusters:
    """Concatenate the clusters of successive entries."""
    ids = []
    n = 0
    for part in parts:
        ids.append(part.ids + n)
        n += part.n
    keys, values = concatenate_rows(*((part.keys, part.values) for part in parts))
    joined = Clusters(mx.concatenate(ids, axis=2), keys, values)
    mx.async_eval(joined.ids, keys, values)
    return joined


def _sums(n: int, ids: mx.array, counts: mx.array) -> mx.array:
    """Sum int32 `counts` by the cluster `ids` `(B, n_kv_heads, m)`: `(B, n_kv_heads, n)`."""
    B, H, _ = ids.shape
    bins = ids + mx.arange(0, B * H * n, n).reshape(B, H, 1)
    counts = mx.broadcast_to(counts, bins.shape)
    sums = mx.zeros(B * H * n, mx.int32).at[bins.flatten()].add(counts.flatten())
    return sums.reshape(B, H, n)


def clusters_of(entries: Any, start: int = 0) -> Clusters:
    """Cluster the entries from position `start` on, one block at a time.

    Args:
        entries: object with `read_keys(first, stop)` and `read_values(first, stop)`, which return `(B, n_kv_heads, n,
            head_dim)` for `n = stop - first`.
        start: position of the first entry to cluster.
    """
    blocks = []
    for first, stop in spans(start, len(entries)):
        n = -(-(stop - first) // CLUSTER_SIZE)
        ids, keys = k_means(entries.read_keys(first, stop), n)
        mx.eval(keys)  # reading the values may read a file
        values = mean_by_cluster(entries.read_values(first, stop), ids, n)
        mx.eval(values)  # limits memory to one block
        blocks.append(Clusters(ids, keys, values))
    return _join(blocks)


def k_means(keys: mx.array, n: int) -> tuple[mx.array, mx.array]:
    """Assign keys `(B, n_kv_heads, m, head_dim)` to `n` clusters.

    Returns: uint16 cluster ids `(B, n_kv_heads, m)`, and mean keys `(B, n_kv_heads, n, head_dim)`.
    """
    if n == 1:
        ids = mx.zeros(keys.shape[:3], mx.uint16)
        return ids, mean_by_cluster(keys, ids, n)
    evenly_spaced = mx.linspace(0, keys.shape[2] - 1, n + 2)[1:-1].astype(mx.int32)
    means = keys[:, :, evenly_spaced]
    for _ in range(K_MEANS_ROUNDS):
        ids = _nearest_centres(keys.astype(mx.float32), means.astype(mx.float32))
        mx.eval(ids)  # limits memory to one round
        means = mean_by_cluster(keys, ids, n)
    return ids, means


def mean_by_cluster(entries: mx.array, ids: mx.array, n: int) -> mx.array:
    """Average entries `(B, n_kv_heads, m, head_dim)` by cluster: `(B, n_kv_heads, n, head_dim)`.

    The mean of an empty cluster is 0. Sums are float32, because a few hundred float16 numbers could overflow.
    """
    members = (ids[:, :, None] == mx.arange(n, dtype=ids.dtype)[:, None]).astype(mx.float32)
    sums, sizes = members @ entries.astype(mx.float32), members.sum(axis=-1, keepdims=True)
    return (sums / mx.maximum(sizes, 1)).astype(entries.dtype)


def _nearest_centres(keys: mx.array, centres: mx.array) -> mx.array:
    """Return the index of each key's nearest centre, uint16 `(B, n_kv_heads, m)`."""
    # The distance leaves out the key's squared norm, which does not change which centre is nearest.
    distances = mx.square(centres).sum(axis=-1)[:, :, None] + keys @ (-2 * centres).mT
    return mx.argmin(distances, axis=-1).astype(mx.uint16)
