"""An index of keys: which entries queries attend to most, found without reading the keys.

Loki (Singhania et al., 2024, arXiv:2406.02542) ranks keys by their first principal components. Here a channel counts
by how large queries are in it, so that the components are those of the logits' variance: half of `head_dim`, in
4 bits each, which is an eighth of the keys' bytes in bfloat16. A quarter of the components in 8 bits each costs as
much, and loses models that look entries up by keys that vary in all directions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import mlx.core as mx

from .attention import latest_votes
from .queries import Queries
from .selection import top_of_groups

SAMPLE = 4096  # keys that the components should be taken from, at most
STEPS = 9  # from a component's mean to its largest value; 8 are held, and few keys lie beyond them
BLOCK = 8192  # tokens whose codes are one array, and whose logits are made at a time
# Of float32 logits and codes, below which all are made at once, without a wait.
WHOLE_BYTES = {mx.cpu: 16 << 20, mx.gpu: 256 << 20}[mx.default_device().type]
SAMPLED = 8  # one key in so many, of which the largest logit of each query is taken then
ASKING = 32  # of the latest queries, which find those that all of them vote for
CANDIDATES = 4  # times as many as are to be chosen, whose exact votes are compared

# Factors `(B, n_kv_heads, group * m, size)` of codes and of their low halves, and what is the same for all keys.
Asking = tuple[mx.array, mx.array, mx.array]


class KeyIndex:
    """Codes of a layer's keys, in order of position.

    Args:
        keys: `(B, n_kv_heads, n, head_dim)`, of which the components are taken; they are not appended.
        queries: `(B, n_heads, m, head_dim)`, each KV head's readers together; None: all channels count alike.

    Attributes:
        n_made_of: how many keys there were, of which those were a sample.
    """

    def __init__(self, keys: mx.array, queries: mx.array | None = None):
        B, H, self.n_made_of, D = keys.shape
        sample = keys.astype(mx.float32)
        weights = mx.ones((B, H, 1, D))
        if queries is not None:
            squares = mx.square(queries.astype(mx.float32)).mean(axis=2).reshape(B, H, -1, D)
            weights = mx.sqrt(squares.mean(axis=2) + 1e-12)[:, :, None]
        self._mean = sample.mean(axis=2, keepdims=True)
        centred = (sample - self._mean) * weights
        covariance = centred.swapaxes(-1, -2) @ centred / sample.shape[2]
        _, vectors = mx.linalg.eigh(covariance, stream=mx.cpu)  # by ascending variance
        vectors = vectors[..., : -2 * _size(D) - 1 : -1]
        largest = mx.abs(centred @ vectors).max(axis=2, keepdims=True)
        step = mx.maximum(largest, 1e-6) / STEPS
        self._of_keys = weights.swapaxes(-1, -2) * vectors / step
        self._of_queries = vectors * step / weights.swapaxes(-1, -2)
        mx.eval(self._mean, self._of_keys, self._of_queries)
        # uint8 `(B, n_kv_heads, size, BLOCK)` each, the last one of fewer tokens: two components a byte.
        self._codes: list[mx.array] = []

    def __len__(self) -> int:
        return sum(codes.shape[3] for codes in self._codes)

    @property
    def nbytes(self) -> int:
        return sum(codes.nbytes for codes in self._codes)

    def append(self, keys: mx.array) -> None:
        """Add the keys `(B, n_kv_heads, L, head_dim)` of the next tokens."""
        levels = ((keys.astype(mx.float32) - self._mean) @ self._of_keys).mT
        high, low = mx.split(mx.clip(mx.floor(levels) + 8, 0, 15).astype(mx.uint8), 2, axis=2)
        codes = 16 * high + low
        if len(self) % BLOCK:
            codes = mx.concatenate([self._codes.pop(), codes], axis=3)
        self._codes += mx.split(codes, range(BLOCK, codes.shape[3], BLOCK), axis=3)
        mx.eval(self._codes)

    def outgrown_by(self, n: int) -> bool:
        """Whether `n` keys are too many for an index of these components: twice as many as they were taken of.

        Keys late in a text differ from early ones, if only by their rotation.
        """
        return n >= 2 * self.n_made_of

    def truncate(self, n: int) -> None:
        self._codes = [
            codes[..., : n - start] for start, codes in zip(range(0, n, BLOCK), self._codes)
        ]

    @property
    def state(self) -> list:
        return [self._mean, self._of_keys, self._of_queries, self._codes]

    @classmethod
    def restored(cls, state: Any, keys: mx.array) -> KeyIndex | None:
        """The index of a file, for keys of this shape; None if it does not fit them."""
        index = cls.__new__(cls)
        B, H, _, D = keys.shape
        size = _size(D)
        try:
            index._mean, index._of_keys, index._of_queries, index._codes = state
            fits = (
                index._mean.shape == (B, H, 1, D)
                and index._of_keys.shape == index._of_queries.shape == (B, H, D, 2 * size)
                and all(c.shape[:3] == (B, H, size) for c in index._codes)
                and all(c.dtype == mx.uint8 and c.shape[3] <= BLOCK for c in index._codes)
                and all(c.shape[3] == BLOCK for c in index._codes[:-1])
            )
        except (AttributeError, IndexError, TypeError, ValueError):
            return None
        index.n_made_of = len(index) if fits else 0
        return index if fits else None

    def __deepcopy__(self, memo: dict) -> KeyIndex:
        other = copy.copy(self)
        other._codes = list(self._codes)
        return other

    def relevance(self, observed: Queries, n: int) -> mx.array:
        """How near each of the first `n` keys comes to the largest logit of any of the queries.

        In nats below it, so that 0 is the best: the maximum over queries, and over a GQA group. It orders entries
        nearly as the softmax does, and takes no exponentials. The queries see all of the keys.

        Returns: `(B, n_kv_heads, n)` float32.
        """
        B, H, _, n_components = self._of_queries.shape
        parts = list(self._parts(observed, n))
        m = parts[0][1][0].shape[2]
        if 4 * B * H * n * (m + n_components) <= WHOLE_BYTES:
            every = [_logits(*part) for part in parts]
            most = _most(x.max(axis=3, keepdims=True) for x in every)
            below = [(x - most).max(axis=2) for x in every]
            return mx.concatenate(below, axis=-1)
        # Few entries are above the largest of a sample, and those are among the best.
        most = _most(
            _in_turn(
                _logits(codes[..., ::SAMPLED], asking).max(axis=3, keepdims=True)
                for codes, asking in parts
            )
        )
        below = _in_turn((_logits(*part) - most).max(axis=2) for part in parts)
        return mx.minimum(mx.concatenate(below, axis=-1), 0)

    def _parts(self, observed: Queries, n: int) -> Iterator[tuple[mx.array, Asking]]:
        """Codes of the first `n` keys, a block or page at a time, and the queries that see them."""
        near = self._asking(observed)
        edges = {*range(0, n, BLOCK), *(min(edge, n) for edge in observed.edges), n}
        for start, stop in pairwise(sorted(edges)):
            seen, first = observed.seen_by(start), start // BLOCK * BLOCK
            asking = near if seen is observed else self._asking(seen)
            yield self._codes[start // BLOCK][..., start - first : stop - first], asking

    def _asking(self, observed: Queries) -> Asking:
        B, H, D, _ = self._of_queries.shape
        heads = (observed.heads.astype(mx.float32) * observed.scale).reshape(B, H, -1, D)
        of_codes = heads @ self._of_queries
        high, low = mx.split(of_codes, 2, axis=-1)
        middle = 7.5 * of_codes.sum(axis=-1, keepdims=True)  # of the levels 0 to 15
        return high / 16, low - high / 16, heads @ self._mean.mT - middle

    def latest_votes(
        self,
        observed: Queries,
        counts: tuple[int, ...],
        budget: int,
        keys_at: Callable[[mx.array], mx.array],
    ) -> mx.array:
        """`entries.attention.latest_votes`, exact among the entries likeliest by the latest queries; others have none.

        Args:
            budget: how many entries are to be chosen by the votes.
            keys_at: gives the keys `(B, n_kv_heads, k, head_dim)` at uint32 positions `(B, n_kv_heads, k)`, as the
                queries see them.
        """
        B, H, _, _ = self._of_queries.shape
        first, T = observed.places.start, len(self)
        n = min(first, CANDIDATES * budget)
        relevance = self.relevance(observed.latest(ASKING), first)
        likeliest = mx.sort(top_of_groups(relevance, n), axis=-1)
        own = mx.broadcast_to(mx.arange(first, T, dtype=mx.uint32), (B, H, T - first))
        places = mx.concatenate([likeliest, own], axis=-1)
        moved = likeliest.shape[-1] - first
        asked = range(first + moved, observed.places.stop + moved)
        seen = replace(observed, places=asked, pages=None)
        found = latest_votes(keys_at(places), seen, counts)
        votes = mx.zeros((len(counts), B, H, T))
        return mx.put_along_axis(votes, mx.broadcast_to(places, found.shape), found, axis=-1)


def index_bytes(keys: mx.array) -> int:
    """Bytes that an index of the keys `(B, n_kv_heads, n, head_dim)` takes."""
    B, H, n, D = keys.shape
    return B * H * n * _size(D)


def _size(head_dim: int) -> int:
    return max(1, head_dim // 4)


def _logits(codes: mx.array, asking: Asking) -> mx.array:
    """`(B, n_kv_heads, group * m, n)` float32."""
    of_bytes, of_low, base = asking
    found = mx.addmm(base, of_bytes, codes.astype(mx.float32))
    return mx.addmm(found, of_low, (codes & 15).astype(mx.float32))


def _most(tops: Iterable[mx.array]) -> mx.array:
    return mx.concatenate(list(tops), axis=3).max(axis=3, keepdims=True)


def _in_turn(made: Iterable[mx.array]) -> list[mx.array]:
    """Computed one after the other, with the memory of one."""
    done = []
    for each in made:
        mx.eval(each)
        done.append(each)
    return done
