"""The rest: what a token does not read, attended to as one entry for each page of neighbours.

The page's entry is its mean key and mean value. A head gives it the logit

    t * (q . mean key) + log(entries of the page that the token does not read) + log a

A mean logit is the logit of the mean key, so the exponential of it never overrates a page's mass; but the values that
a head would have found there are not the mean value, and how far to trust it differs from head to head. The mass `a`
and the temperature `t` of each head are found once, for the prompt's last queries, whose attention to all entries is at
hand: the pair is taken whose output comes nearest to that. RetroInfer (Chen et al., 2025, arXiv:2505.02922) estimates
by clusters, with a = t = 1; SparQ (Ribar et al., 2024, arXiv:2312.04985) by one mean value.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import mlx.core as mx

from .attention import HIDDEN

PAGE = 256  # neighbours that share a mean
MASSES = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0, 1.5)
TEMPERATURES = (1.0, 0.75, 0.5)
FITTED = 16  # of the prompt's last queries, for which mass and temperature are found
NOTHING = 1e-30  # for the logarithm of a mass of 0, which `HIDDEN` stands for then


@dataclass(frozen=True)
class Rest:
    """The means of a layer's first entries, and how its heads weigh them.

    `(B, n_kv_heads, n_pages, head_dim)` and `(B, n_kv_heads, group, 1, 1)` each.
    """

    keys: mx.array
    values: mx.array
    log_mass: mx.array
    temperature: mx.array

    @property
    def n_pages(self) -> int:
        return self.keys.shape[2]

    def bias(self, queries: mx.array, unread: mx.array) -> mx.array:
        """What a token adds to the pages' logits `q . mean key`, `(B, n_heads, L, n_pages)` float32.

        Args:
            queries: `(B, n_heads, L, head_dim)`, scaled, each KV head's together.
            unread: `(B, n_kv_heads, n_pages)`: how many entries of each page are not read.
        """
        logits = page_logits(queries, self.keys) * (self.temperature - 1)
        counts = unread[:, :, None, None]
        weighed = logits + mx.log(mx.maximum(counts, NOTHING)) + self.log_mass
        return mx.where((counts > 0) & (self.log_mass > HIDDEN), weighed, HIDDEN).flatten(1, 2)


def page_logits(queries: mx.array, keys: mx.array) -> mx.array:
    """`(B, n_kv_heads, group, L, n_pages)` float32."""
    grouped = mx.unflatten(queries.astype(mx.float32), 1, (keys.shape[1], -1))
    return grouped @ keys.astype(mx.float32)[:, :, None].swapaxes(-1, -2)


def page_means(entries: mx.array) -> mx.array:
    """Means of every `PAGE` of `(B, n_kv_heads, n, head_dim)` entries; of the last page, of as many as there are."""
    n, whole = entries.shape[2], entries.shape[2] // PAGE * PAGE
    means = mx.unflatten(entries[:, :, :whole], 2, (-1, PAGE)).mean(axis=3)
    if whole == n:
        return means
    return mx.concatenate([means, entries[:, :, whole:].mean(axis=2, keepdims=True)], axis=2)


def page_counts(positions: mx.array, n_pages: int) -> mx.array:
    """How many of the uint32 `positions` `(B, n_kv_heads, n)` are in each page: int32 `(B, n_kv_heads, n_pages)`."""
    B, H, _ = positions.shape
    first = mx.arange(0, B * H * n_pages, n_pages, dtype=mx.uint32).reshape(B, H, 1)
    places = (positions // PAGE + first).flatten()
    counts = mx.zeros(B * H * n_pages, mx.int32).at[places].add(1)
    return counts.reshape(B, H, n_pages)


def span_counts(start: int, stop: int, n_pages: int) -> mx.array:
    """How many of the positions `[start, stop)` are in each page, int32 `(n_pages,)`."""
    first = mx.arange(n_pages) * PAGE
    inside = mx.minimum(first + PAGE, stop) - mx.maximum(first, start)
    return mx.maximum(inside, 0)


PAIRS = list(product(MASSES, TEMPERATURES))  # the first is no rest at all


@dataclass(frozen=True)
class Example:
    """Queries of the prompt, and what tokens of their places would have read.

    Attributes:
        queries: `(B, n_heads, m, head_dim)`, scaled, each KV head's together.
        read: bool `(B, n_kv_heads, m, n)`, the entries that each would have read.
        first: position of the first query; it sees the entries up to its own.
        sinks: logits `(n_heads,)` of attention sinks, a part of the softmax, if there are any.
    """

    queries: mx.array
    read: mx.array
    first: int
    sinks: mx.array | None = None


def distances(keys: mx.array, values: mx.array, pages: mx.array, example: Example) -> mx.array:
    """How far heads' outputs are from full attention's, squared and summed over an example's queries.

    Args:
        keys, values: `(B, n_kv_heads, n, head_dim)`, all entries.
        pages: the means of both, one behind the other along the first axis.

    Returns: `(len(PAIRS), B, n_kv_heads, group)` float32.
    """
    H, n, m = keys.shape[1], keys.shape[2], example.queries.shape[2]
    own = mx.arange(example.first, example.first + m)[:, None]
    seen = mx.arange(n) <= own
    logits = mx.where(seen, page_logits(example.queries, keys), HIDDEN)
    top = logits.max(axis=-1, keepdims=True)
    weights = mx.exp(logits - top)
    of_sinks = mx.zeros_like(top)
    if example.sinks is not None:
        sinks = mx.unflatten(example.sinks.astype(mx.float32), 0, (H, -1))[None, :, :, None, None]
        of_sinks = mx.exp(sinks - top)
    of_values = values.astype(mx.float32)[:, :, None]
    full = (weights @ of_values) / (weights.sum(axis=-1, keepdims=True) + of_sinks)
    weights = mx.where(example.read[:, :, None], weights, 0)
    total, sums = weights.sum(axis=-1, keepdims=True) + of_sinks, weights @ of_values
    unread = _by_page((seen & ~example.read).astype(mx.float32))[:, :, None]
    rest, of_pages = page_logits(example.queries, pages[0]), pages[1].astype(mx.float32)[:, :, None]
    masses = {t: unread * mx.exp(rest * t - top) for t in TEMPERATURES}
    products = {t: (x.sum(axis=-1, keepdims=True), x @ of_pages) for t, x in masses.items()}
    found = [(sums + a * products[t][1]) / (total + a * products[t][0]) for a, t in PAIRS]
    return mx.stack([mx.square(x - full).sum(axis=-1).sum(axis=-1) for x in found])


def best_factors(errors: mx.array) -> tuple[mx.array, mx.array]:
    """The logarithm of the mass and the temperature, `(B, n_kv_heads, group, 1, 1)` each, with the least distances."""
    best = mx.array(PAIRS)[mx.argmin(errors, axis=0)]
    mass, temperature = best[..., 0], best[..., 1]
    log_mass = mx.where(mass > 0, mx.log(mx.maximum(mass, NOTHING)), HIDDEN)
    return log_mass[..., None, None], temperature[..., None, None]


def _by_page(flags: mx.array) -> mx.array:
    """Sums of every `PAGE` of `(..., n)`."""
    padding = [(0, 0)] * (flags.ndim - 1) + [(0, -flags.shape[-1] % PAGE)]
    return mx.unflatten(mx.pad(flags, padding), -1, (-1, PAGE)).sum(axis=-1)
