"""The rest: what a token does not read, attended to as one entry for each cluster of similar keys.

The cluster's entry is its mean key and mean value. A head gives it the logit

    t * (q . mean key) + log(entries of the cluster that the token does not read) + log a

A mean logit is the logit of the mean key, so the exponential of it never overrates a cluster's mass; but the values
that a head would have found there are not the mean value, and how far to trust it differs from head to head. The mass
`a` and the temperature `t` of each head are found once, for the prompt's last queries, whose attention to all entries
is at hand: the pair is taken whose output comes nearest to that. RetroInfer (Chen et al., 2025, arXiv:2505.02922)
estimates by clusters, with a = t = 1; SparQ (Ribar et al., 2024, arXiv:2312.04985) by one mean value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx

from ..entries.attention import HIDDEN
from ..entries.spans import BLOCK_SIZE, spans
from .clusters import Clusters

MASSES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5)
TEMPERATURES = (1.0, 0.75, 0.5)
# Last queries of the prompt for which mass and temperature are found. Sixteen would take four times as long; the KL of
# SmolLM2-135M after 1,400 tokens would be 0.0077 instead of 0.0090, after 6,000 tokens the same.
WEIGHING_QUERIES = 4
# entries of a long text from which the full attention of those queries is estimated
SAMPLED_ENTRIES = 1 << 16
SAMPLED_RUN = 256  # neighbours that are sampled together

SMALLEST_MASS = 1e-30  # for the logarithm of a mass of 0, which `HIDDEN` stands for then


class Rest(NamedTuple):
    """The clusters of a layer's first entries, and how its heads weigh them.

    Entries of each cluster that a token may choose are `(B, n_kv_heads, n_clusters)`, mass and temperature
    `(B, n_kv_heads, group, 1, 1)` each.
    """

    clusters: Clusters
    choosable: mx.array
    log_mass: mx.array
    temperature: mx.array

    def bias(self, queries: mx.array, scale: float, places: mx.array) -> mx.array:
        """What a token adds to the clusters' logits `scale * (q . mean key)`, `(B, n_heads, L, n_clusters)`.

        It is of the queries' type. Of float16 it is at most the largest number: infinity would make the output NaN.

        Args:
            queries: `(B, n_heads, L, head_dim)`, each KV head's together.
            places: the entries that they have chosen, uint32 `(B, n_kv_heads, k)`.
        """
        unread = (self.choosable - self.clusters.sizes(places))[:, :, None, None]
        logits = scale * grouped_logits(queries, self.clusters.keys)
        logits = logits * (self.temperature - 1) + mx.log(mx.maximum(unread, SMALLEST_MASS))
        seen = (unread > 0) & (self.log_mass > HIDDEN)
        bias = mx.where(seen, logits + self.log_mass, HIDDEN)
        if queries.dtype == mx.float16:
            bias = mx.minimum(bias, mx.finfo(mx.float16).max)
        return bias.astype(queries.dtype).flatten(1, 2)


def grouped_logits(queries: mx.array, keys: mx.array) -> mx.array:
    """Of heads' queries and their KV head's keys, `(B, n_kv_heads, group, L, n)` float32."""
    B, H, _, D = keys.shape
    by_head = queries.astype(mx.float32).reshape(B, H, -1, D)
    logits = by_head @ keys.astype(mx.float32).mT
    return mx.unflatten(logits, 2, (-1, queries.shape[2]))


PAIRS = list(product(MASSES, TEMPERATURES))  # the first is no rest at all


@dataclass(frozen=True)
class Example:
    """Queries of the prompt, and what tokens of their places would have read.

    Attributes:
        queries: `(B, n_heads, m, head_dim)`, scaled, each KV head's together.
        read: bool `(B, n_kv_heads, m, n)`, the entries that each would have read.
        middle: entries that some of them would have chosen among; the others, up to their own, they read always.
        first: position of the first query; it sees the entries up to its own.
        sinks: logits `(n_heads,)` of attention sinks, a part of the softmax, if there are any.
    """

    queries: mx.array
    read: mx.array
    middle: range
    first: int
    sinks: mx.array | None = None

    def sees(self, places: mx.array) -> mx.array:
        """Which entries at these places each query sees, bool `(m, n)`."""
        return places <= mx.arange(self.first, self.first + self.queries.shape[2])[:, None]

    def sampled(self) -> Iterator[tuple[list[tuple[int, int]], float]]:
        """Spans of entries that are read together, and how many entries each of theirs stands for.

        All entries, or of a long text pages here and there in its middle.
        """
        n = self.read.shape[-1]
        first, last = -(-self.middle.start // SAMPLED_RUN), self.middle.stop // SAMPLED_RUN
        step = math.ceil((last - first) * SAMPLED_RUN / SAMPLED_ENTRIES)
        if step <= 1:
            yield from (([span], 1) for span in spans(0, n))
            return
        pages, together = range(first + step // 2, last, step), BLOCK_SIZE // SAMPLED_RUN
        for i in range(0, len(pages), together):
            some = [
                (page * SAMPLED_RUN, (page + 1) * SAMPLED_RUN) for page in pages[i : i + together]
            ]
            yield some, (last - first) / len(pages)
        for span in (*spans(0, first * SAMPLED_RUN), *spans(last * SAMPLED_RUN, n)):
            yield [span], 1

    def mass_of_sinks(self, top: mx.array) -> mx.array:
        """`exp(logit - top)` of attention sinks, or 0: `(B, n_kv_heads, group, m, 1)` float32, as `top` is."""
        if self.sinks is None:
            return mx.array(0.0)
        by_head = mx.unflatten(self.sinks.astype(mx.float32), 0, (top.shape[1], -1))
        return mx.exp(by_head[None, :, :, None, None] - top)


def distances(entries: Any, clusters: Clusters, example: Example) -> mx.array:
    """How far heads' outputs are from full attention's, squared and summed over an example's queries.

    Args:
        entries: gives keys and values `(B, n_kv_heads, stop - start, head_dim)` by `read_keys(start, stop)` and
            `read_values`; they are read a block at a time, once, and of a long text not all.
        clusters: of all entries.

    Returns: `(len(PAIRS), B, n_kv_heads, group)` float32.
    """
    top = mx.array(HIDDEN)
    # Of all that is seen, and of what is read: the softmax's denominator and the sum of values, times `exp(-top)`.
    every = read = mx.array(0.0), mx.array(0.0)
    for some, each in example.sampled():
        places = mx.concatenate([mx.arange(*span) for span in some])
        keys = mx.concatenate([entries.read_keys(*span) for span in some], axis=2)
        values = mx.concatenate([entries.read_values(*span) for span in some], axis=2)
        values = values.astype(mx.float32)[:, :, None]
        logits = grouped_logits(example.queries, keys) + math.log(each)
        logits = mx.where(example.sees(places), logits, HIDDEN)
        is_read = mx.take(example.read, places, axis=-1)[:, :, None]
        before, top = top, mx.maximum(top, logits.max(axis=-1, keepdims=True))
        weights, fewer = mx.exp(logits - top), mx.exp(before - top)
        every = _summed(every, fewer, weights, values)
        read = _summed(read, fewer, mx.where(is_read, weights, 0), values)
        mx.eval(top, every, read)
    of_sinks = example.mass_of_sinks(top)
    every, read = ((total + of_sinks, sums) for total, sums in (every, read))
    full, (total, sums) = every[1] / every[0], read
    unread = example.sees(mx.arange(len(entries))) & ~example.read
    counts, values = clusters.sizes_where(unread)[:, :, None], clusters.values.astype(mx.float32)
    logits = grouped_logits(example.queries, clusters.keys)
    masses = {t: counts * mx.exp(logits * t - top) for t in TEMPERATURES}
    products = {
        t: (x.sum(axis=-1, keepdims=True), x @ values[:, :, None]) for t, x in masses.items()
    }
    found = [(sums + a * products[t][1]) / (total + a * products[t][0]) for a, t in PAIRS]
    return mx.stack([mx.square(x - full).sum(axis=-1).sum(axis=-1) for x in found])


def _summed(
    sums: tuple[mx.array, mx.array], fewer: mx.array, weights: mx.array, values: mx.array
) -> tuple[mx.array, mx.array]:
    return sums[0] * fewer + weights.sum(axis=-1, keepdims=True), sums[1] * fewer + weights @ values


def best_factors(errors: mx.array) -> tuple[mx.array, mx.array]:
    """The logarithm of the mass and the temperature, `(B, n_kv_heads, group, 1, 1)` each, with the least distances."""
    best = mx.array(PAIRS)[mx.argmin(errors, axis=0)]
    mass, temperature = best[..., 0], best[..., 1]
    log_mass = mx.where(mass > 0, mx.log(mx.maximum(mass, SMALLEST_MASS)), HIDDEN)
    return log_mass[..., None, None], temperature[..., None, None]
