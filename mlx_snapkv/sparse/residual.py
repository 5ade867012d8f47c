"""The residual of sparse attention: each cluster's unread entries are represented by the cluster's mean entry.

A head gives a cluster's mean key the logit

    t * scale * (q . mean key) + log(number of unread entries in the cluster) + log a

Each head has its own mass `a` and temperature `t`. The product `scale * (q . mean key)` is the mean of the logits of
the cluster's entries. By Jensen's inequality, the exponential of this mean never exceeds the mean of the exponentials.
So with a = t = 1, the weight of a cluster without read entries is never too large before normalisation. But a head may
weight the values in a cluster unevenly, so the mean value represents the cluster better for some heads than others.
Mass and temperature are therefore chosen for each head at the end of the prompt: full attention is computed for the
last queries, and the pair that comes closest to its output is chosen. RetroInfer (Chen et al., 2025, arXiv:2505.02922)
also uses clusters, with a = t = 1. SparQ (Ribar et al., 2024, arXiv:2312.04985) uses one mean value for all unread
entries.
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
# Mass and temperature are fitted to this many queries at the end of the prompt. Using sixteen would make fitting take
# four times as long. For SmolLM2-135M, it would lower the KL divergence from the full cache's predictions from 0.0090
# to 0.0077 after a prompt of 1,400 tokens, but make no difference after 6,000.
FITTING_QUERIES = 4
# Full attention to the middle (see `Example`) is computed from at most this many entries. If the middle has more, only
# a sample of its entries is used.
SAMPLED_ENTRIES = 1 << 16
SAMPLED_RUN = 256  # the sample consists of runs of this many adjacent entries

# Replaces 0 as the argument of a logarithm. The logarithm is then replaced by `HIDDEN_LOGIT`.
SMALLEST_MASS = 1e-30


class Residual(NamedTuple):
    """A layer's clusters, and each head's factors for weighting the cluster means.

    Attributes:
        clusters: clusters of all entries.
        choosable: for each cluster, the number of its entries that tokens choose among, `(B, n_kv_heads, n_clusters)`.
        log_mass: each head's log `a`, or `HIDDEN_LOGIT` if a = 0, `(B, n_kv_heads, group, 1, 1)`.
        temperature: each head's `t`, of the same shape.
    """

    clusters: Clusters
    choosable: mx.array
    log_mass: mx.array
    temperature: mx.array

    def count_unread(self, positions: mx.array) -> mx.array:
        """Count the unread entries in each cluster, int32 `(B, n_kv_heads, n_clusters)`.

        Args:
            positions: positions of the chosen entries, uint32 `(B, n_kv_heads, k)`.
        """
        return self.choosable - self.clusters.sizes(positions)

    def bias(self, queries: mx.array, scale: float, positions: mx.array) -> mx.array:
        """Return a bias for the logits of the cluster means, `(B, n_heads, L, n_clusters)`, in the queries' dtype.

        Attention to a cluster mean has the logit `scale * (q . mean key)`. Adding the bias gives the logit from the
        module docstring: `bias = (t - 1) * logit + log(number of unread entries in the cluster) + log a`. The bias is
        `HIDDEN_LOGIT` if the cluster has no unread entries, or if a = 0.

        Args:
            queries: `(B, n_heads, L, head_dim)`, with the heads of a GQA group adjacent.
            scale: scale of the logits.
            positions: positions of the chosen entries, uint32 `(B, n_kv_heads, k)`.
        """
        n_unread = self.count_unread(positions)[:, :, None, None]
        mean_logits = scale * grouped_logits(queries, self.clusters.keys)
        bias = _mean_bias(mean_logits, n_unread, self.log_mass, self.temperature)
        if queries.dtype == mx.float16:  # a bias of +infinity would turn the output into NaN
            bias = mx.minimum(bias, mx.finfo(mx.float16).max)
        return bias.astype(queries.dtype).flatten(1, 2)


@partial(mx.compile, shapeless=True)
def _mean_bias(
    mean_logits: mx.array, n_unread: mx.array, log_mass: mx.array, temperature: mx.array
) -> mx.array:
    """Compute `Residual.bias` per KV head, float32 `(B, n_kv_heads, group, L, n_clusters)`."""
    log_unread = mx.log(mx.maximum(n_unread, SMALLEST_MASS))
    bias = mean_logits * (temperature - 1) + log_unread + log_mass
    is_visible = (n_unread > 0) & (log_mass > HIDDEN_LOGIT)
    return mx.where(is_visible, bias, HIDDEN_LOGIT)


def grouped_logits(queries: mx.array, keys: mx.array) -> mx.array:
    """Return the dot products of queries and keys, float32 `(B, n_kv_heads, group, L, n)`.

    Args:
        queries: `(B, n_heads, L, head_dim)`, with the heads of a GQA group adjacent.
        keys: `(B, n_kv_heads, n, head_dim)`.
    """
    B, H, _, D = keys.shape
    queries_by_kv_head = queries.astype(mx.float32).reshape(B, H, -1, D)
    logits = queries_by_kv_head @ keys.astype(mx.float32).mT
    n_tokens = queries.shape[2]
    return mx.unflatten(logits, 2, (-1, n_tokens))


class AttentionSums(NamedTuple):
    """The softmax denominator and numerator over a set of entries. Both are scaled by `exp(-top logit)`.

    Attributes:
        weight: the denominator, a sum of weights, `(B, n_kv_heads, group, m, 1)`.
        value: the numerator, a weighted sum of values, `(B, n_kv_heads, group, m, head_dim)`.
    """

    weight: mx.array
    value: mx.array

    def rescaled(self, factor: mx.array) -> AttentionSums:
        """Return the sums for a different top logit. `factor` is `exp(old top logit - new top logit)`."""
        return AttentionSums(self.weight * factor, self.value * factor)

    def plus(self, weights: mx.array, values: mx.array) -> AttentionSums:
        """Add entries with the given softmax weights, and return the new sums."""
        weight = weights.sum(axis=-1, keepdims=True)
        return AttentionSums(self.weight + weight, self.value + weights @ values)


PAIRS = list(product(MASSES, TEMPERATURES))  # the first pairs, with mass 0, turn the residual off


@dataclass(frozen=True)
class Example:
    """The prompt's last queries, and the entries that each of them would read with sparse attention.

    Attributes:
        queries: scaled queries, `(B, n_heads, m, head_dim)`, with the heads of a GQA group adjacent.
        is_read: mask of the entries that each query would read, bool `(B, n_kv_heads, m, n)`.
        middle: positions of the entries that every query chooses among. Outside the middle, each query reads almost all
            entries up to its own position.
        start: position of the first query.
        sinks: logits of the model's attention sinks, `(n_heads,)`, or None.
    """

    queries: mx.array
    is_read: mx.array
    middle: range
    start: int
    sinks: mx.array | None = None

    def causal_mask(self, positions: mx.array) -> mx.array:
        """Return a causal mask for the entries at `positions` `(n,)`, bool `(m, n)`."""
        stop = self.start + self.queries.shape[2]
        query_positions = mx.arange(self.start, stop)[:, None]
        return positions <= query_positions

    def sampled_spans(self) -> Iterator[tuple[list[tuple[int, int]], float]]:
        """Yield `(spans, n_represented)`. Each entry in the spans represents `n_represented` entries of the text.

        The spans in one item are read together. If the text is short, the items cover all of it. If it is long, they
        cover everything outside the middle, and a sample of the middle.
        """
        n_entries = self.is_read.shape[-1]
        # A run is `SAMPLED_RUN` adjacent entries. Runs `[first_run, stop_run)` lie entirely in the middle.
        first_run = math.ceil(self.middle.start / SAMPLED_RUN)
        stop_run = self.middle.stop // SAMPLED_RUN
        n_runs = stop_run - first_run
        step = math.ceil(
            n_runs * SAMPLED_RUN / SAMPLED_ENTRIES
        )  # one of every `step` runs is sampled
        is_short_text = step <= 1
        if is_short_text:
            for span in spans(0, n_entries):
                yield [span], 1
            return
        sampled_runs = range(first_run + step // 2, stop_run, step)
        runs_at_once = BLOCK_SIZE // SAMPLED_RUN
        for i in range(0, len(sampled_runs), runs_at_once):
            runs = sampled_runs[i : i + runs_at_once]
            run_spans = [(run * SAMPLED_RUN, (run + 1) * SAMPLED_RUN) for run in runs]
            yield run_spans, n_runs / len(sampled_runs)
        # Yield all entries before `first_run` and from `stop_run` on, not only a sample.
        spans_before = spans(0, first_run * SAMPLED_RUN)
        spans_after = spans(stop_run * SAMPLED_RUN, n_entries)
        for span in (*spans_before, *spans_after):
            yield [span], 1

    def sink_weight(self, top: mx.array) -> mx.array:
        """Return the sinks' `exp(logit - top)`, or 0 without sinks. `top` is `(B, n_kv_heads, group, m, 1)` float32."""
        if self.sinks is None:
            return mx.array(0.0)
        n_kv_heads = top.shape[1]
        sinks_by_kv_head = mx.unflatten(self.sinks.astype(mx.float32), 0, (n_kv_heads, -1))
        return mx.exp(sinks_by_kv_head[None, :, :, None, None] - top)


def distances(entries: Any, clusters: Clusters, example: Example) -> mx.array:
    """Measure how far each head's output is from full attention's, for each (mass, temperature) in `PAIRS`.

    Args:
        entries: object with a length, and with `read_keys(start, stop)` and `read_values(start, stop)`, which return
            `(B, n_kv_heads, stop - start, head_dim)`. Each block is read once, and a long text is sampled.
        clusters: clusters of all entries.
        example: queries whose outputs are compared.

    Returns: squared distances, summed over the queries, `(len(PAIRS), B, n_kv_heads, group)` float32.
    """
    top, full_sums, read_sums = _attention_sums(entries, example)
    full_output = full_sums.value / full_sums.weight
    all_positions = mx.arange(len(entries))
    is_unread = example.causal_mask(all_positions) & ~example.is_read
    n_unread = clusters.sizes_where(is_unread)[:, :, None]
    mean_values = clusters.values.astype(mx.float32)[:, :, None]
    mean_logits = grouped_logits(example.queries, clusters.keys)
    mean_sums: dict[float, AttentionSums] = {}  # temperature -> sums over the cluster means
    for temperature in TEMPERATURES:
        mean_weights = n_unread * mx.exp(mean_logits * temperature - top)
        weight_sum = mean_weights.sum(axis=-1, keepdims=True)
        mean_sums[temperature] = AttentionSums(weight_sum, mean_weights @ mean_values)
    squared_distances: list[mx.array] = []
    for mass, temperature in PAIRS:
        weight = read_sums.weight + mass * mean_sums[temperature].weight
        value = read_sums.value + mass * mean_sums[temperature].value
        sparse_output = value / weight
        squares = mx.square(sparse_output - full_output)
        squared_distances.append(squares.sum(axis=-1).sum(axis=-1))
    return mx.stack(squared_distances)


def _attention_sums(
    entries: Any, example: Example
) -> tuple[mx.array, AttentionSums, AttentionSums]:
    """Return each query's top logit, and its sums over all entries and over the entries that it would read."""
    top = mx.array(HIDDEN_LOGIT)
    full_sums = read_sums = AttentionSums(mx.array(0.0), mx.array(0.0))
    for entry_spans, n_represented in example.sampled_spans():
        positions = mx.concatenate([mx.arange(*span) for span in entry_spans])
        keys = mx.concatenate([entries.read_keys(*span) for span in entry_spans], axis=2)
        values = mx.concatenate([entries.read_values(*span) for span in entry_spans], axis=2)
        values = values.astype(mx.float32)[:, :, None]
        logits = grouped_logits(example.queries, keys) + math.log(n_represented)
        logits = mx.where(example.causal_mask(positions), logits, HIDDEN_LOGIT)
        is_read = mx.take(example.is_read, positions, axis=-1)[:, :, None]
        # Rescale the earlier sums if these spans have a larger logit, as an online softmax does.
        earlier_top = top
        top = mx.maximum(top, logits.max(axis=-1, keepdims=True))
        rescaling = mx.exp(earlier_top - top)
        weights = mx.exp(logits - top)
        full_sums = full_sums.rescaled(rescaling).plus(weights, values)
        read_sums = read_sums.rescaled(rescaling).plus(mx.where(is_read, weights, 0), values)
        mx.async_eval(top, full_sums, read_sums)
    sink_weight = example.sink_weight(top)
    full_sums = full_sums._replace(weight=full_sums.weight + sink_weight)
    read_sums = read_sums._replace(weight=read_sums.weight + sink_weight)
    return top, full_sums, read_sums


def best_factors(squared_distances: mx.array) -> tuple[mx.array, mx.array]:
    """Return each head's best log mass and temperature, `(B, n_kv_heads, group, 1, 1)` each.

    The best pair is the one with the smallest distance.

    Args:
        squared_distances: `(len(PAIRS), B, n_kv_heads, group)`, from `distances`.
    """
    best_pair = mx.argmin(squared_distances, axis=0)
    masses, temperatures = zip(*PAIRS)
    # Look up masses and temperatures separately. Views of one array of pairs would not be contiguous, so a kernel would
    # copy them for every token.
    mass, temperature = mx.array(masses)[best_pair], mx.array(temperatures)[best_pair]
    finite_log_mass = mx.log(mx.maximum(mass, SMALLEST_MASS))
    log_mass = mx.where(mass > 0, finite_log_mass, HIDDEN_LOGIT)
    return log_mass[..., None, None], temperature[..., None, None]
