"""Clusters of a layer's entries: of those with similar keys, wherever they stand, one mean key and one mean value.

K-means (Lloyd, 1982, "Least squares quantization in PCM") of every block of entries for itself, from keys evenly apart
and in few rounds: more rounds, smaller clusters or larger blocks bring an answer no nearer to the full cache's.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx

from .quantization import join, rows
from .selection import counted
from .spans import BLOCK, spans
from .threads import by_heads

SIZE = 256  # entries of a cluster, on average
ROUNDS = 2
ONE = mx.array(1)


@dataclass(frozen=True)
class Clusters:
    """The clusters of a layer's first entries.

    Attributes:
        of: which cluster each entry is in, uint16 `(B, n_kv_heads, n)`.
        keys: mean keys, `(B, n_kv_heads, n_clusters, head_dim)`.
        values: mean values.
    """

    of: mx.array
    keys: mx.array
    values: mx.array

    def __len__(self) -> int:
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        return self.of.nbytes + self.keys.nbytes + self.values.nbytes

    def whole_blocks(self, n: int) -> Clusters | None:
        """Those of whole blocks among the first `n` entries, which stay when more come; None if there are none."""
        n_blocks = min(n, self.of.shape[2]) // BLOCK
        if n_blocks == 0:
            return None
        of = mx.contiguous(self.of[:, :, : n_blocks * BLOCK])
        return Clusters(of, *rows((self.keys, self.values), 0, n_blocks * (BLOCK // SIZE)))

    def followed_by(self, other: Clusters) -> Clusters:
        """With those of the entries behind."""
        of = mx.concatenate([self.of, other.of + len(self)], axis=2)
        mx.eval(of)
        return Clusters(of, *join((self.keys, self.values), (other.keys, other.values)))

    def sizes(self, places: mx.array) -> mx.array:
        """How many of uint32 `places` `(B, n_kv_heads, k)` are in each cluster, int32 `(B, n_kv_heads, n_clusters)`."""
        return by_heads(partial(_sizes, len(self)), self.of.shape[2], self.of, places)

    def sizes_where(self, flags: mx.array) -> mx.array:
        """How many of bool `(B, n_kv_heads, m, n)` are true in each cluster, int32 `(B, n_kv_heads, m, n_clusters)`."""
        each = flags.astype(mx.int32)
        return mx.stack(
            [_sums(len(self), self.of, each[:, :, i]) for i in range(flags.shape[2])], axis=2
        )


def _sizes(n: int, of: mx.array, places: mx.array) -> mx.array:
    return _sums(n, mx.take_along_axis(of, places, axis=-1), ONE)


def _sums(n: int, of: mx.array, counts: mx.array) -> mx.array:
    """The sums of int32 counts by cluster, `of` which each is."""
    B, H, _ = of.shape
    bins = _bins(of, counted(B * H, n).reshape(B, H, 1))
    sums = _zeros(B * H * n).at[bins.flatten()].add(mx.broadcast_to(counts, bins.shape).flatten())
    return sums.reshape(B, H, n)


@partial(mx.compile, shapeless=True)
def _bins(of: mx.array, first: mx.array) -> mx.array:
    return of + first


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
    found: Clusters | None = None
    for first, stop in spans(start, len(entries)):
        n = -(-(stop - first) // SIZE)
        of, keys = k_means(entries.read_keys(first, stop), n)
        mx.eval(keys)  # before the values are read, perhaps from a file
        values = mean_by_cluster(entries.read_values(first, stop), of, n)
        mx.eval(values)
        new = Clusters(of, keys, values)
        found = new if found is None else found.followed_by(new)
    assert found is not None
    return found


def k_means(keys: mx.array, n: int) -> tuple[mx.array, mx.array]:
    """Which of `n` clusters each of the keys `(B, n_kv_heads, m, head_dim)` is in, uint16 `(B, n_kv_heads, m)`, and the
    means `(B, n_kv_heads, n, head_dim)`."""
    apart = mx.linspace(0, keys.shape[2] - 1, n + 2)[1:-1].astype(mx.int32)
    means = keys[:, :, apart]
    for _ in range(ROUNDS):
        of = _nearest(keys.astype(mx.float32), means.astype(mx.float32))
        mx.eval(of)  # with the memory of one round
        means = mean_by_cluster(keys, of, n)
    return of, means


def mean_by_cluster(entries: mx.array, of: mx.array, n: int) -> mx.array:
    """The means of `(B, n_kv_heads, m, head_dim)` by cluster, `(B, n_kv_heads, n, head_dim)`; 0 of an empty one.

    They are summed in float32: of float16, sums of a few hundred numbers may be too large.
    """
    members = (of[:, :, None] == mx.arange(n, dtype=of.dtype)[:, None]).astype(mx.float32)
    sums, sizes = members @ entries.astype(mx.float32), members.sum(axis=-1, keepdims=True)
    return (sums / mx.maximum(sizes, 1)).astype(entries.dtype)


def _nearest(keys: mx.array, centres: mx.array) -> mx.array:
    # The squared distance, but for the key's own square, which is the same to all centres.
    distances = mx.square(centres).sum(axis=-1)[:, :, None] + keys @ (-2 * centres).mT
    return mx.argmin(distances, axis=-1).astype(mx.uint16)
