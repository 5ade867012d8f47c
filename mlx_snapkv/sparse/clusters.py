"""Cluster entries with similar keys. Each cluster has a mean key and a mean value.

Each block of 8,192 entries is clustered separately with k-means (Lloyd, 1982, "Least squares quantization in PCM"),
starting from evenly spaced keys. More rounds, smaller clusters or larger blocks do not bring answers closer to those of
the full cache. An answer's entries are added in groups of at most 256. Each group is one cluster.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from ..entries.quantization import concatenate_rows, slice_rows
from ..entries.spans import BLOCK_SIZE, spans

# Average number of entries per cluster. Smaller clusters hardly improve answers, and may even make them worse: for the
# same number of bytes, a token then reads more means and fewer entries (measured by scripts/measure_residual.py).
CLUSTER_SIZE = 256
CLUSTERS_PER_BLOCK = BLOCK_SIZE // CLUSTER_SIZE
ID_TYPE = mx.uint16  # dtype of cluster ids
K_MEANS_ROUNDS = 2  # more rounds take longer without improving answers
ONE = mx.array(1)


class Clusters(NamedTuple):
    """The clusters of successive entries of a layer.

    Attributes:
        ids: cluster id of each entry, `(B, n_kv_heads, n)`. uint16 is enough for 16 million entries.
        keys: mean keys, `(B, n_kv_heads, n_clusters, head_dim)`.
        values: mean values, of the same shape.
    """

    ids: mx.array
    keys: mx.array
    values: mx.array

    @property
    def n_clusters(self) -> int:
        """Return the number of clusters."""
        return self.keys.shape[2]

    @property
    def n_entries(self) -> int:
        """Return the number of entries in all clusters."""
        return self.ids.shape[2]

    def complete_blocks(self) -> CompleteBlocks | None:
        """Return the clusters of complete blocks, which later entries won't change, or None if no block is complete."""
        n_blocks = self.n_entries // BLOCK_SIZE
        if n_blocks == 0:
            return None
        ids = self.ids[:, :, : n_blocks * BLOCK_SIZE]
        ids_in_block = (ids % CLUSTERS_PER_BLOCK).astype(mx.uint8)
        mx.async_eval(ids_in_block)
        n_clusters = n_blocks * CLUSTERS_PER_BLOCK
        keys, values = slice_rows((self.keys, self.values), 0, n_clusters)
        return CompleteBlocks(ids_in_block, keys, values)

    def followed_by(self, other: Clusters) -> Clusters:
        """Return these clusters followed by `other`, the clusters of the next entries."""
        return _concatenate([self, other])

    def sizes(self, positions: mx.array) -> mx.array:
        """Return how many of the entries at `positions` are in each cluster, int32 `(B, n_kv_heads, n_clusters)`.

        Args:
            positions: `(B, n_kv_heads, k)`.
        """
        ids = mx.take_along_axis(self.ids, positions, axis=-1)
        return _sum_by_cluster(ONE, ids, self.n_clusters)

    def sizes_between(self, start: int, stop: int) -> mx.array:
        """Return how many of the entries `[start, stop)` are in each cluster, int32 `(B, n_kv_heads, n_clusters)`."""
        sizes = _sum_by_cluster(ONE, self.ids[:, :, start:stop], self.n_clusters)
        mx.async_eval(sizes)
        return sizes

    def sizes_where(self, is_counted: mx.array) -> mx.array:
        """Count the entries that `is_counted` marks for each query, by cluster: int32 `(B, n_kv_heads, m, n_clusters)`.

        Args:
            is_counted: mask of the entries to count for each of `m` queries, bool `(B, n_kv_heads, m, n)`.
        """
        sizes: list[mx.array] = []
        for query in range(is_counted.shape[2]):
            counts = is_counted[:, :, query].astype(mx.int32)
            sizes.append(_sum_by_cluster(counts, self.ids, self.n_clusters))
            mx.async_eval(sizes[-1])
        return mx.stack(sizes, axis=2)


@dataclass(frozen=True)
class CompleteBlocks:
    """The clusters of a layer's complete blocks. `StoredKVCache` keeps them between turns.

    Attributes:
        ids: cluster id of each entry, starting from 0 in each block, uint8 `(B, n_kv_heads, n)`.
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

    def within_first(self, n_entries: int) -> CompleteBlocks | None:
        """Return the clusters of the complete blocks in the first `n_entries`, or None if no block is complete."""
        if n_entries >= self.n_entries:
            return self
        n_blocks = n_entries // BLOCK_SIZE
        if n_blocks == 0:
            return None
        ids = self.ids[:, :, : n_blocks * BLOCK_SIZE]
        n_clusters = n_blocks * CLUSTERS_PER_BLOCK
        keys, values = slice_rows((self.keys, self.values), 0, n_clusters)
        return CompleteBlocks(ids, keys, values)

    def to_clusters(self) -> Clusters:
        """Convert to `Clusters`, whose ids are unique across blocks."""
        block_of_each_entry = mx.arange(self.n_entries) // BLOCK_SIZE
        first_ids = (block_of_each_entry * CLUSTERS_PER_BLOCK).astype(ID_TYPE)
        # The GPU kernels would copy non-contiguous arrays for every token.
        return Clusters(self.ids + first_ids, mx.contiguous(self.keys), mx.contiguous(self.values))


def _concatenate(parts: list[Clusters]) -> Clusters:
    """Concatenate the clusters of successive spans of entries, and renumber them."""
    renumbered_ids: list[mx.array] = []
    n_earlier_clusters = 0
    for part in parts:
        renumbered_ids.append(part.ids + n_earlier_clusters)
        n_earlier_clusters += part.n_clusters
    ids = mx.concatenate(renumbered_ids, axis=2)
    keys, values = concatenate_rows(*((part.keys, part.values) for part in parts))
    mx.async_eval(ids, keys, values)
    return Clusters(ids, keys, values)


def _sum_by_cluster(counts: mx.array, ids: mx.array, n_clusters: int) -> mx.array:
    """Return the sum of the counts in each cluster, int32 `(B, n_kv_heads, n_clusters)`.

    Args:
        counts: int32 `(B, n_kv_heads, m)`, or an array that broadcasts to this shape.
        ids: cluster id of each count, `(B, n_kv_heads, m)`.
        n_clusters: number of clusters.
    """
    B, H, _ = ids.shape
    # Number the bins consecutively, with `n_clusters` bins for each head of each sequence.
    n_bins = B * H * n_clusters
    first_bins = mx.arange(0, n_bins, n_clusters).reshape(B, H, 1)
    bins = ids + first_bins
    counts = mx.broadcast_to(counts, bins.shape)
    sums = mx.zeros(n_bins, mx.int32).at[bins.flatten()].add(counts.flatten())
    return sums.reshape(B, H, n_clusters)


def cluster_entries(entries: Any, start: int = 0) -> Clusters:
    """Cluster the entries at or after position `start`, one block at a time.

    Args:
        entries: object with a length, and with `read_keys(first, stop)` and `read_values(first, stop)`, which return
            `(B, n_kv_heads, stop - first, head_dim)`.
        start: position of the first entry to cluster.
    """
    blocks: list[Clusters] = []
    for first, stop in spans(start, len(entries)):
        n_clusters = math.ceil((stop - first) / CLUSTER_SIZE)
        ids, mean_keys = k_means(entries.read_keys(first, stop), n_clusters)
        mx.eval(mean_keys)  # evaluate now, so that the keys are freed before the values are read
        mean_values = mean_by_cluster(entries.read_values(first, stop), ids, n_clusters)
        # Evaluate now, so that the temporary arrays of only one block are in memory.
        mx.eval(mean_values)
        blocks.append(Clusters(ids, mean_keys, mean_values))
    return _concatenate(blocks)


def k_means(keys: mx.array, n_clusters: int) -> tuple[mx.array, mx.array]:
    """Assign keys `(B, n_kv_heads, n, head_dim)` to `n_clusters` clusters.

    Returns: uint16 cluster ids `(B, n_kv_heads, n)`, and mean keys `(B, n_kv_heads, n_clusters, head_dim)`.
    """
    B, H, n_keys, _ = keys.shape
    if n_clusters == 1:
        ids = mx.zeros((B, H, n_keys), ID_TYPE)
        return ids, mean_by_cluster(keys, ids, n_clusters)
    # Start from evenly spaced keys, leaving out the first and the last one.
    start_indices = mx.linspace(0, n_keys - 1, n_clusters + 2)[1:-1].astype(mx.int32)
    means = keys[:, :, start_indices]
    for _ in range(K_MEANS_ROUNDS):
        ids = _nearest_centres(keys.astype(mx.float32), means.astype(mx.float32))
        mx.eval(ids)  # evaluate now, so that only one round's distances are in memory at a time
        means = mean_by_cluster(keys, ids, n_clusters)
    return ids, means


def mean_by_cluster(entries: mx.array, ids: mx.array, n_clusters: int) -> mx.array:
    """Return the mean of each cluster's entries, `(B, n_kv_heads, n_clusters, head_dim)`.

    The mean of an empty cluster is 0. Sums are float32, because a sum of a few hundred float16 numbers could overflow.

    Args:
        entries: keys or values, `(B, n_kv_heads, n, head_dim)`.
        ids: cluster id of each entry, `(B, n_kv_heads, n)`.
        n_clusters: number of clusters.
    """
    cluster_ids = mx.arange(n_clusters, dtype=ids.dtype)[:, None]
    # `is_member` has the shape (B, n_kv_heads, n_clusters, n).
    is_member = (ids[:, :, None] == cluster_ids).astype(mx.float32)
    sums = is_member @ entries.astype(mx.float32)
    sizes = is_member.sum(axis=-1, keepdims=True)
    return (sums / mx.maximum(sizes, 1)).astype(entries.dtype)


def _nearest_centres(keys: mx.array, centres: mx.array) -> mx.array:
    """Return the index of each key's nearest centre, uint16 `(B, n_kv_heads, m)`."""
    squared_norms = mx.square(centres).sum(axis=-1)[:, :, None]
    # Leave out the key's squared norm, because it is the same for all centres.
    distances = squared_norms + keys @ (-2 * centres).mT
    return mx.argmin(distances, axis=-1).astype(ID_TYPE)
