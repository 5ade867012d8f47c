"""The residual of sparse attention: unread entries, represented by one mean entry per cluster of similar keys.

A head gives the mean key of a cluster the logit

    t * (q . mean key) + log(number of unread entries in the cluster) + log a

The mean of a cluster's logits is the logit of its mean key. By Jensen's inequality, the exponential of this logit never
exceeds the cluster's share of the softmax. But a head may weight the values of a cluster unevenly, so heads differ in
how well the mean value represents the cluster. The mass `a` and the temperature `t` of each head are chosen at the end
of the prompt: full attention is computed for the last queries, and the pair whose output comes closest is selected.
RetroInfer (Chen et al., 2025, arXiv:2505.02922) also estimates by clusters, with a = t = 1. SparQ (Ribar et al., 2024,
arXiv:2312.04985) uses one mean value for all unread entries.
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
# Number of last queries by which mass and temperature are chosen. Sixteen would take four times as long. The KL of
# SmolLM2-135M would be 0.0077 instead of 0.0090 after 1,400 tokens, and equal after 6,000 tokens.
WEIGHING_QUERIES = 4
# number of entries of a long text from which full attention is estimated for these queries
SAMPLED_ENTRIES = 1 << 16
SAMPLED_RUN = 256  # number of adjacent entries in a sample

SMALLEST_MASS = 1e-30  # avoids the logarithm of 0, which is replaced by `HIDDEN` afterwards


class Residual(NamedTuple):
    """The clusters of a layer's entries, and the factors by which each head weighs the cluster means.

    Attributes:
        clusters: the clusters of all entries.
        choosable: number of entries in each cluster that a token may choose, `(B, n_kv_heads, n_clusters)`.
        log_mass: log `a` of each head, `(B, n_kv_heads, group, 1, 1)`; `HIDDEN` for a = 0.
        temperature: `t` of each head, of the same shape.
    """

    clusters: Clusters
    choosable: mx.array
    log_mass: mx.array
    temperature: mx.array

    def unread(self, positions: mx.array) -> mx.array:
        """Count the unread entries of each cluster, int32 `(B, n_kv_heads, n_clusters)`.

        Args:
            positions: positions of the chosen entries, uint32 `(B, n_kv_heads, k)`.
        """
        return self.choosable - self.clusters.sizes(positions)

    def bias(self, queries: mx.array, scale: float, positions: mx.array) -> mx.array:
        """Return the bias of the cluster means' logits, `(B, n_heads, L, n_clusters)`, in the queries' dtype.

        Added to the logit `scale * (q . mean key)`, the bias gives the logit in the formula of this module: `bias = (t
        - 1) * logit + log(number of unread entries in the cluster) + log a`. The bias is `HIDDEN` if the token reads
        all entries of the cluster, or if a = 0.

        Args:
            queries: `(B, n_heads, L, head_dim)`; the heads of a GQA group are adjacent.
            scale: factor of the logits.
            positions: positions of the chosen entries, uint32 `(B, n_kv_heads, k)`.
        """
        n_unread = self.unread(positions)[:, :, None, None]
        logits = scale * grouped_logits(queries, self.clusters.keys)
        bias = _bias(logits, n_unread, self.log_mass, self.temperature)
        if queries.dtype == mx.float16:  # an infinite bias would make the output NaN
            bias = mx.minimum(bias, mx.finfo(mx.float16).max)
        return bias.astype(queries.dtype).flatten(1, 2)


@partial(mx.compile, shapeless=True)
def _bias(
    logits: mx.array, n_unread: mx.array, log_mass: mx.array, temperature: mx.array
) -> mx.array:
    """Compute `Residual.bias` per KV head, float32 `(B, n_kv_heads, group, L, n_clusters)`."""
    log_unread = mx.log(mx.maximum(n_unread, SMALLEST_MASS))
    bias = logits * (temperature - 1) + log_unread + log_mass
    is_visible = (n_unread > 0) & (log_mass > HIDDEN)
    return mx.where(is_visible, bias, HIDDEN)


def grouped_logits(queries: mx.array, keys: mx.array) -> mx.array:
    """Multiply queries by keys, per KV head: float32 logits `(B, n_kv_heads, group, L, n)`.

    Args:
        queries: `(B, n_heads, L, head_dim)`; the heads of a GQA group are adjacent.
        keys: `(B, n_kv_heads, n, head_dim)`.
    """
    B, H, _, D = keys.shape
    by_head = queries.astype(mx.float32).reshape(B, H, -1, D)
    logits = by_head @ keys.astype(mx.float32).mT
    return mx.unflatten(logits, 2, (-1, queries.shape[2]))


# The softmax's denominator and the weighted sum of values of some entries, both times `exp(-top logit)`.
Sums = tuple[mx.array, mx.array]
PAIRS = list(product(MASSES, TEMPERATURES))  # the first pair ignores the residual


@dataclass(frozen=True)
class Example:
    """The prompt's last queries, with the entries that each would have read if the answer had begun there.

    Attributes:
        queries: scaled queries `(B, n_heads, m, head_dim)`; the heads of a GQA group are adjacent.
        read: bool `(B, n_kv_heads, m, n)`, true for entries that a query would have read.
        middle: positions of the entries that queries choose among. Each query reads all other entries up to its own.
        first: position of the first query.
        sinks: logits `(n_heads,)` of the model's attention sinks, if it has any.
    """

    queries: mx.array
    read: mx.array
    middle: range
    first: int
    sinks: mx.array | None = None

    def sees(self, positions: mx.array) -> mx.array:
        """Return a causal mask for entries at `positions` `(n,)`: bool `(m, n)`."""
        return positions <= mx.arange(self.first, self.first + self.queries.shape[2])[:, None]

    def sampled_spans(self) -> Iterator[tuple[list[tuple[int, int]], float]]:
        """Yield `(spans, weight)`: spans of entries to read together, and how many entries each of these represents.

        The spans cover all entries of a short text, and a sample of the middle of a long text.
        """
        n_entries = self.read.shape[-1]
        # A page has `SAMPLED_RUN` entries. The whole pages of the middle are numbered from `first` to `stop`.
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
        # The entries outside the middle are all read.
        for span in (*spans(0, first * SAMPLED_RUN), *spans(stop * SAMPLED_RUN, n_entries)):
            yield [span], 1

    def mass_of_sinks(self, top: mx.array) -> mx.array:
        """Return `exp(logit - top)` of the attention sinks, or 0; `top` is `(B, n_kv_heads, group, m, 1)` float32."""
        if self.sinks is None:
            return mx.array(0.0)
        by_head = mx.unflatten(self.sinks.astype(mx.float32), 0, (top.shape[1], -1))
        return mx.exp(by_head[None, :, :, None, None] - top)


def distances(entries: Any, clusters: Clusters, example: Example) -> mx.array:
    """Measure how far each head's output is from full attention, for each pair (mass, temperature) of `PAIRS`.

    Args:
        entries: object with `read_keys(start, stop)` and `read_values(start, stop)`, which return
            `(B, n_kv_heads, stop - start, head_dim)`. Each block is read once; a long text is sampled.
        clusters: the clusters of all entries.
        example: queries for which full attention is computed.

    Returns: squared distances, summed over the queries, `(len(PAIRS), B, n_kv_heads, group)` float32.
    """
    top, full_sums, read_sums = _attention_sums(entries, example)
    full_output = full_sums[1] / full_sums[0]
    unread = example.sees(mx.arange(len(entries))) & ~example.read
    counts = clusters.sizes_where(unread)[:, :, None]
    values = clusters.values.astype(mx.float32)[:, :, None]
    logits = grouped_logits(example.queries, clusters.keys)
    mean_sums = {}
    for temperature in TEMPERATURES:
        weights = counts * mx.exp(logits * temperature - top)
        mean_sums[temperature] = weights.sum(axis=-1, keepdims=True), weights @ values
    results = []
    for mass, temperature in PAIRS:
        total, weighted = (x + mass * y for x, y in zip(read_sums, mean_sums[temperature]))
        difference = weighted / total - full_output
        results.append(mx.square(difference).sum(axis=-1).sum(axis=-1))
    return mx.stack(results)


def _attention_sums(entries: Any, example: Example) -> tuple[mx.array, Sums, Sums]:
    """Return each query's top logit, and its `Sums` over all entries and over the entries that it would have read."""
    top = mx.array(HIDDEN)
    full = read = mx.array(0.0), mx.array(0.0)
    for entry_spans, weight in example.sampled_spans():
        positions = mx.concatenate([mx.arange(*span) for span in entry_spans])
        keys = mx.concatenate([entries.read_keys(*span) for span in entry_spans], axis=2)
        values = mx.concatenate([entries.read_values(*span) for span in entry_spans], axis=2)
        values = values.astype(mx.float32)[:, :, None]
        logits = grouped_logits(example.queries, keys) + math.log(weight)
        logits = mx.where(example.sees(positions), logits, HIDDEN)
        is_read = mx.take(example.read, positions, axis=-1)[:, :, None]
        earlier_top = top
        top = mx.maximum(top, logits.max(axis=-1, keepdims=True))
        weights = mx.exp(logits - top)
        factor = mx.exp(earlier_top - top)
        full = _add(full, factor, weights, values)
        read = _add(read, factor, mx.where(is_read, weights, 0), values)
        mx.async_eval(top, full, read)
    sinks = example.mass_of_sinks(top)
    return top, (full[0] + sinks, full[1]), (read[0] + sinks, read[1])


def _add(sums: Sums, factor: mx.array, weights: mx.array, values: mx.array) -> Sums:
    """Rescale sums by `factor` to a new top logit, and add weights and weighted values."""
    total, weighted = sums
    return total * factor + weights.sum(
        axis=-1, keepdims=True
    ), weighted * factor + weights @ values


def best_factors(distances: mx.array) -> tuple[mx.array, mx.array]:
    """Return log mass and temperature of the smallest distance, `(B, n_kv_heads, group, 1, 1)` each."""
    # Two separate arrays, because a kernel would copy a view for every token.
    best = mx.argmin(distances, axis=0)
    mass, temperature = (mx.array(factors)[best] for factors in zip(*PAIRS))
    log_mass = mx.where(mass > 0, mx.log(mx.maximum(mass, SMALLEST_MASS)), HIDDEN)
    return log_mass[..., None, None], temperature[..., None, None]
