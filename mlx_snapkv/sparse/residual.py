"""The residual: entries that a token does not read, attended to as one mean entry per cluster of similar keys.

A head gives a cluster's mean key the logit

    t * (q . mean key) + log(entries of the cluster that the token does not read) + log a

The mean of a cluster's logits is the logit of its mean key, so its exponential never overrates the cluster's share of
the softmax. But a head may weight the cluster's values unevenly, so heads differ in how far they can trust the mean
value. The mass `a` and the temperature `t` of each head are chosen at the end of the prompt: full attention is computed
for its last queries, and the pair is taken whose output comes nearest to it. RetroInfer (Chen et al., 2025,
arXiv:2505.02922) estimates by clusters, with a = t = 1; SparQ (Ribar et al., 2024, arXiv:2312.04985) by one mean value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx

from ..entries.attention import HIDDEN
from ..entries.spans import BLOCK_SIZE, spans
from .clusters import Clusters

MASSES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5)  # candidates for `a`; 0 ignores the residual
TEMPERATURES = (1.0, 0.75, 0.5)  # candidates for `t`
# Last queries of the prompt for which mass and temperature are found. Sixteen would take four times as long; the KL of
# SmolLM2-135M after 1,400 tokens would be 0.0077 instead of 0.0090, after 6,000 tokens the same.
WEIGHING_QUERIES = 4
# entries of a long text from which the full attention of those queries is estimated
SAMPLED_ENTRIES = 1 << 16
SAMPLED_RUN = 256  # neighbours that are sampled together

SMALLEST_MASS = 1e-30  # keeps the logarithm of 0 finite; the result is replaced by `HIDDEN`


class Residual(NamedTuple):
    """The clusters of a layer's first entries, and the two factors by which each head weighs their means.

    Attributes:
        clusters: the clusters of all entries.
        choosable: number of entries per cluster that a token may choose, `(B, n_kv_heads, n_clusters)`.
        log_mass: log `a` of each head, `(B, n_kv_heads, group, 1, 1)`; `HIDDEN` for a = 0.
        temperature: `t` of each head, of the same shape.
    """

    clusters: Clusters
    choosable: mx.array
    log_mass: mx.array
    temperature: mx.array

    def unread(self, places: mx.array) -> mx.array:
        """Return the number of entries of each cluster that a token does not read, int32 `(B, n_kv_heads, n_clusters)`.

        Args:
            places: entries that the token has chosen, uint32 `(B, n_kv_heads, k)`.
        """
        return self.choosable - self.clusters.sizes(places)

    def bias(self, queries: mx.array, scale: float, places: mx.array) -> mx.array:
        """Return the bias of the clusters' means, `(B, n_heads, L, n_clusters)`, in the queries' dtype.

        The attention adds it to a mean's logit `scale * (q . mean key)`, which gives the logit of the module's formula:
        `bias = (t - 1) * logit + log(entries of the cluster that the token does not read) + log a`. It is `HIDDEN` if
        the token reads all entries of the cluster, or if a = 0.

        Args:
            queries: `(B, n_heads, L, head_dim)`, with the heads of a KV head together.
            scale: factor of the logits.
            places: entries that the queries have chosen, uint32 `(B, n_kv_heads, k)`.
        """
        n_unread = self.unread(places)[:, :, None, None]
        logits = scale * grouped_logits(queries, self.clusters.keys)
        bias = _bias(logits, n_unread, self.log_mass, self.temperature)
        if queries.dtype == mx.float16:  # infinity would make the output NaN
            bias = mx.minimum(bias, mx.finfo(mx.float16).max)
        return bias.astype(queries.dtype).flatten(1, 2)


@partial(mx.compile, shapeless=True)
def _bias(
    logits: mx.array, n_unread: mx.array, log_mass: mx.array, temperature: mx.array
) -> mx.array:
    """Return `Residual.bias` by KV head, float32 `(B, n_kv_heads, group, L, n_clusters)`."""
    log_unread = mx.log(mx.maximum(n_unread, SMALLEST_MASS))
    bias = logits * (temperature - 1) + log_unread + log_mass
    is_visible = (n_unread > 0) & (log_mass > HIDDEN)
    return mx.where(is_visible, bias, HIDDEN)


def grouped_logits(queries: mx.array, keys: mx.array) -> mx.array:
    """Return the logits of queries and keys by KV head, float32 `(B, n_kv_heads, group, L, n)`.

    Args:
        queries: `(B, n_heads, L, head_dim)`, with the heads of a KV head together.
        keys: `(B, n_kv_heads, n, head_dim)`.
    """
    B, H, _, D = keys.shape
    by_head = queries.astype(mx.float32).reshape(B, H, -1, D)
    logits = by_head @ keys.astype(mx.float32).mT
    return mx.unflatten(logits, 2, (-1, queries.shape[2]))


PAIRS = list(product(MASSES, TEMPERATURES))  # the first pair ignores the residual


@dataclass(frozen=True)
class Example:
    """The prompt's last queries, and the entries that each would have read if the answer had begun there.

    Attributes:
        queries: `(B, n_heads, m, head_dim)`, scaled, with the heads of a KV head together.
        read: bool `(B, n_kv_heads, m, n)`, the entries that each query would have read.
        middle: positions of entries that are read by choice; all queries read the others, up to their own position.
        first: position of the first query.
        sinks: logits `(n_heads,)` of the model's attention sinks, if it has any.
    """

    queries: mx.array
    read: mx.array
    middle: range
    first: int
    sinks: mx.array | None = None

    def sees(self, places: mx.array) -> mx.array:
        """Return which entries at `places` `(n,)` precede each query or are its own: bool `(m, n)`."""
        return places <= mx.arange(self.first, self.first + self.queries.shape[2])[:, None]

    def sampled(self) -> Iterator[tuple[list[tuple[int, int]], float]]:
        """Yield spans of entries to read together, and by how many entries each of these counts.

        The spans cover all entries, or in a long text a sample of its middle.
        """
        n_entries = self.read.shape[-1]
        # Pages are runs of `SAMPLED_RUN` entries; whole pages of the middle are numbered from `first` to `stop`.
        first = math.ceil(self.middle.start / SAMPLED_RUN)
        stop = self.middle.stop // SAMPLED_RUN
        step = math.ceil((stop - first) * SAMPLED_RUN / SAMPLED_ENTRIES)
        if step <= 1:
            for span in spans(0, n_entries):
                yield [span], 1
            return
        pages = range(first + step // 2, stop, step)
        pages_at_once = BLOCK_SIZE // SAMPLED_RUN
        for i in range(0, len(pages), pages_at_once):
            at_once = pages[i : i + pages_at_once]
            page_spans = [(page * SAMPLED_RUN, (page + 1) * SAMPLED_RUN) for page in at_once]
            yield page_spans, (stop - first) / len(pages)
        # The entries before and after the middle are all read.
        for span in (*spans(0, first * SAMPLED_RUN), *spans(stop * SAMPLED_RUN, n_entries)):
            yield [span], 1

    def mass_of_sinks(self, top: mx.array) -> mx.array:
        """Return `exp(logit - top)` of the attention sinks, or 0; `top` is `(B, n_kv_heads, group, m, 1)` float32."""
        if self.sinks is None:
            return mx.array(0.0)
        by_head = mx.unflatten(self.sinks.astype(mx.float32), 0, (top.shape[1], -1))
        return mx.exp(by_head[None, :, :, None, None] - top)


def distances(entries: Any, clusters: Clusters, example: Example) -> mx.array:
    """Return each head's squared distance to the output of full attention for each of `PAIRS`, summed over queries.

    Args:
        entries: have `read_keys(start, stop)` and `read_values(start, stop)`, which return
            `(B, n_kv_heads, stop - start, head_dim)`; each block is read once, and a long text is sampled.
        clusters: the clusters of all entries.
        example: the queries, and the output of full attention to compare with.

    Returns: `(len(PAIRS), B, n_kv_heads, group)` float32.
    """
    top = mx.array(HIDDEN)
    # The softmax's denominator and the weighted sum of values, both times `exp(-top)`: of all entries, of those read.
    every = read = mx.array(0.0), mx.array(0.0)
    for some, each in example.sampled():
        places = mx.concatenate([mx.arange(*span) for span in some])
        keys = mx.concatenate([entries.read_keys(*span) for span in some], axis=2)
        values = mx.concatenate([entries.read_values(*span) for span in some], axis=2)
        values = values.astype(mx.float32)[:, :, None]
        logits = grouped_logits(example.queries, keys) + math.log(each)
        logits = mx.where(example.sees(places), logits, HIDDEN)
        is_read = mx.take(example.read, places, axis=-1)[:, :, None]
        before = top
        top = mx.maximum(top, logits.max(axis=-1, keepdims=True))
        weights = mx.exp(logits - top)
        factor = mx.exp(before - top)
        every = _summed(every, factor, weights, values)
        read = _summed(read, factor, mx.where(is_read, weights, 0), values)
        mx.async_eval(top, every, read)
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
    outputs = [(sums + a * products[t][1]) / (total + a * products[t][0]) for a, t in PAIRS]
    return mx.stack([mx.square(x - full).sum(axis=-1).sum(axis=-1) for x in outputs])


def _summed(
    sums: tuple[mx.array, mx.array], factor: mx.array, weights: mx.array, values: mx.array
) -> tuple[mx.array, mx.array]:
    """Add weights and weighted values to sums, after scaling the sums by `factor` to the new top logit."""
    return sums[0] * factor + weights.sum(axis=-1, keepdims=True), sums[
        1
    ] * factor + weights @ values


def best_factors(distances: mx.array) -> tuple[mx.array, mx.array]:
    """Return log mass and temperature with the smallest of `distances`, `(B, n_kv_heads, group, 1, 1)` each."""
    # Two arrays instead of two views of one, which a kernel would copy for every token.
    best = mx.argmin(distances, axis=0)
    mass, temperature = (mx.array(factors)[best] for factors in zip(*PAIRS))
    log_mass = mx.where(mass > 0, mx.log(mx.maximum(mass, SMALLEST_MASS)), HIDDEN)
    return log_mass[..., None, None], temperature[..., None, None]
