"""The residual of sparse attention: each cluster's unread entries are represented by a mean entry.

A head gives a cluster's mean key the logit

    t * (q . mean key) + log(number of unread entries in the cluster) + log a

The logit of the mean key is the mean of the cluster's logits, so by Jensen's inequality, its exponential never exceeds
the mean of the exponentials. But a head may weigh the values in a cluster unevenly, so the mean value represents the
cluster better for some heads than for others. Each head's mass `a` and temperature `t` are therefore chosen at the end
of the prompt: full attention is computed for the last queries, and the pair whose output comes closest is selected.
RetroInfer (Chen et al., 2025, arXiv:2505.02922) also uses clusters, with a = t = 1. SparQ (Ribar et al., 2024,
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

from ..entries.attention import HIDDEN_LOGIT
from ..entries.spans import BLOCK_SIZE, spans
from .clusters import Clusters

MASSES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5)  # candidates for `a`; 0 turns the residual off
TEMPERATURES = (1.0, 0.75, 0.5)  # candidates for `t`
# Number of last queries from which mass and temperature are chosen. Sixteen would take four times as long. The KL of
# SmolLM2-135M would be 0.0077 instead of 0.0090 after 1,400 tokens, but the same after 6,000 tokens.
WEIGHING_QUERIES = 4
# Number of entries from which the full attention of these queries is estimated in a long text.
SAMPLED_ENTRIES = 1 << 16
SAMPLED_RUN = 256  # number of adjacent entries in each sample

SMALLEST_MASS = 1e-30  # avoids log(0), which is replaced by `HIDDEN_LOGIT` afterwards


class Residual(NamedTuple):
    """A layer's clusters, and the factors by which each head weighs the cluster means.

    Attributes:
        clusters: clusters of all entries.
        choosable: number of entries in each cluster that a token may choose, `(B, n_kv_heads, n_clusters)`.
        log_mass: each head's log `a`, or `HIDDEN_LOGIT` if a = 0, `(B, n_kv_heads, group, 1, 1)`.
        temperature: each head's `t`, of the same shape.
    """

    clusters: Clusters
    choosable: mx.array
    log_mass: mx.array
    temperature: mx.array

    def unread(self, positions: mx.array) -> mx.array:
        """Count the unread entries in each cluster, int32 `(B, n_kv_heads, n_clusters)`.

        Args:
            positions: positions of the chosen entries, uint32 `(B, n_kv_heads, k)`.
        """
        return self.choosable - self.clusters.sizes(positions)

    def bias(self, queries: mx.array, scale: float, positions: mx.array) -> mx.array:
        """Return a bias for the logits of the cluster means, `(B, n_heads, L, n_clusters)`, in the queries' dtype.

        The attention computes the logit `scale * (q . mean key)`. The bias turns this logit into the one in the module
        docstring: `bias = (t - 1) * logit + log(number of unread entries in the cluster) + log a`. It is `HIDDEN_LOGIT`
        if the token reads all entries of the cluster, or if a = 0.

        Args:
            queries: `(B, n_heads, L, head_dim)`, with the heads of a GQA group adjacent.
            scale: scale of the logits.
            positions: positions of the chosen entries, uint32 `(B, n_kv_heads, k)`.
        """
        n_unread = self.unread(positions)[:, :, None, None]
        logits = scale * grouped_logits(queries, self.clusters.keys)
        bias = _bias(logits, n_unread, self.log_mass, self.temperature)
        if queries.dtype == mx.float16:  # an infinite bias would turn the output into NaN
            bias = mx.minimum(bias, mx.finfo(mx.float16).max)
        return bias.astype(queries.dtype).flatten(1, 2)


@partial(mx.compile, shapeless=True)
def _bias(
    logits: mx.array, n_unread: mx.array, log_mass: mx.array, temperature: mx.array
) -> mx.array:
    """Compute `Residual.bias` per KV head, float32 `(B, n_kv_heads, group, L, n_clusters)`."""
    log_unread = mx.log(mx.maximum(n_unread, SMALLEST_MASS))
    bias = logits * (temperature - 1) + log_unread + log_mass
    is_visible = (n_unread > 0) & (log_mass > HIDDEN_LOGIT)
    return mx.where(is_visible, bias, HIDDEN_LOGIT)


def grouped_logits(queries: mx.array, keys: mx.array) -> mx.array:
    """Multiply queries by keys, per KV head: float32 logits `(B, n_kv_heads, group, L, n)`.

    Args:
        queries: `(B, n_heads, L, head_dim)`, with the heads of a GQA group adjacent.
        keys: `(B, n_kv_heads, n, head_dim)`.
    """
    B, H, _, D = keys.shape
    by_head = queries.astype(mx.float32).reshape(B, H, -1, D)
    logits = by_head @ keys.astype(mx.float32).mT
    return mx.unflatten(logits, 2, (-1, queries.shape[2]))


# The softmax denominator of some entries and the weighted sum of their values, both scaled by `exp(-top logit)`.
Sums = tuple[mx.array, mx.array]
PAIRS = list(product(MASSES, TEMPERATURES))  # the first pair has no residual


@dataclass(frozen=True)
class Example:
    """The prompt's last queries, and the entries that each of them would read with sparse attention.

    Attributes:
        queries: scaled queries, `(B, n_heads, m, head_dim)`, with the heads of a GQA group adjacent.
        read: mask of the entries that each query would read, bool `(B, n_kv_heads, m, n)`.
        middle: positions of the entries that the queries choose among. A query reads all other entries up to its own.
        first: position of the first query.
        sinks: logits of the model's attention sinks, `(n_heads,)`, or None.
    """

    queries: mx.array
    read: mx.array
    middle: range
    first: int
    sinks: mx.array | None = None

    def sees(self, positions: mx.array) -> mx.array:
        """Return a causal mask for the entries at `positions` `(n,)`: bool `(m, n)`."""
        return positions <= mx.arange(self.first, self.first + self.queries.shape[2])[:, None]

    def sampled_spans(self) -> Iterator[tuple[list[tuple[int, int]], float]]:
        """Yield `(spans, weight)`: spans to read together, and how many entries each of their entries represents.

        In a short text, the spans cover all entries. In a long text, they cover a sample of the middle and everything
        else.
        """
        n_entries = self.read.shape[-1]
        # Here, a page has `SAMPLED_RUN` entries. The middle contains the whole pages `[first, stop)`.
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
        # Read all entries outside these pages.
        for span in (*spans(0, first * SAMPLED_RUN), *spans(stop * SAMPLED_RUN, n_entries)):
            yield [span], 1

    def mass_of_sinks(self, top: mx.array) -> mx.array:
        """Return the sinks' `exp(logit - top)`, or 0 without sinks. `top` is `(B, n_kv_heads, group, m, 1)` float32."""
        if self.sinks is None:
            return mx.array(0.0)
        by_head = mx.unflatten(self.sinks.astype(mx.float32), 0, (top.shape[1], -1))
        return mx.exp(by_head[None, :, :, None, None] - top)


def distances(entries: Any, clusters: Clusters, example: Example) -> mx.array:
    """Measure how far each head's output is from full attention, for each (mass, temperature) in `PAIRS`.

    Args:
        entries: object with `read_keys(start, stop)` and `read_values(start, stop)`, which return
            `(B, n_kv_heads, stop - start, head_dim)`. Each block is read once, and a long text is sampled.
        clusters: clusters of all entries.
        example: queries for which to compare the outputs.

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
    """Return each query's top logit, and its `Sums` over all entries and over the entries that it would read."""
    top = mx.array(HIDDEN_LOGIT)
    full = read = mx.array(0.0), mx.array(0.0)
    for entry_spans, weight in example.sampled_spans():
        positions = mx.concatenate([mx.arange(*span) for span in entry_spans])
        keys = mx.concatenate([entries.read_keys(*span) for span in entry_spans], axis=2)
        values = mx.concatenate([entries.read_values(*span) for span in entry_spans], axis=2)
        values = values.astype(mx.float32)[:, :, None]
        logits = grouped_logits(example.queries, keys) + math.log(weight)
        logits = mx.where(example.sees(positions), logits, HIDDEN_LOGIT)
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
    """Rescale `sums` to a new top logit by `factor`, then add weights and weighted values."""
    total, weighted = sums
    return total * factor + weights.sum(
        axis=-1, keepdims=True
    ), weighted * factor + weights @ values


def best_factors(distances: mx.array) -> tuple[mx.array, mx.array]:
    """Return the log mass and temperature with the smallest distance, `(B, n_kv_heads, group, 1, 1)` each."""
    # Return separate arrays, because a kernel would copy views for every token.
    best = mx.argmin(distances, axis=0)
    mass, temperature = (mx.array(factors)[best] for factors in zip(*PAIRS))
    log_mass = mx.where(mass > 0, mx.log(mx.maximum(mass, SMALLEST_MASS)), HIDDEN_LOGIT)
    return log_mass[..., None, None], temperature[..., None, None]
