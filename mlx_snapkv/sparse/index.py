"""An index of keys: it ranks entries by their attention without reading the keys.

Loki (Singhania et al., 2024, arXiv:2406.02542) ranks keys by their first principal components. Here a channel is
weighted by the size of the queries in it, so that the components explain the variance of the logits: half of
`head_dim` components, in 4 bits each, 17/128 of the keys' bytes in bfloat16. A quarter of the components in 8 bits
each takes as many bytes, and fails for models that look entries up by keys that vary in all directions.

The codes are the OCP's MXFP4 (Microscaling Formats v1.0, section 5.1): floats of 4 bits, 32 of which share a power of
two. MLX multiplies by them as they are stored, in one operation. Sixteen even steps per component rank a little better
(the best 1/16 of 6,000 entries misses 12.0% of SmolLM2's attention, with MXFP4 12.2%, with exact logits 11.3%), but
need two float32 copies of all codes per token.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from ..entries.quantization import Stored
from ..entries.queries import Queries
from ..entries.spans import spans
from .held_rows import HeldRows, MakeAside

EXACT_ENTRIES = (
    8192  # up to here a token ranks entries by exact attention, which costs more with every entry
)
MAX_SAMPLED_KEYS = 4096  # keys that the principal components are computed from
MXFP4: dict[str, Any] = {"mode": "mxfp4", "group_size": 32, "bits": 4}
MXFP4_GROUP = 32  # components per power of two
LOGIT_BYTES = 64 << 20  # bytes of float32 logits computed at once
LOGIT_DIVISOR_IN_FILES = 8  # an eighth of these where codes are in a file, to save memory


def ranks_by_index(n: int) -> bool:
    """Return whether a token ranks `n` entries by an index of their keys."""
    return n > EXACT_ENTRIES


class KeyIndex:
    """Codes of a layer's keys, in order of position.

    Args:
        keys: a sample `(B, n_kv_heads, n, head_dim)` to compute the components from; they are not appended.
        queries: a sample `(B, n_heads, m, head_dim)` to weight the channels, heads of a KV head together; None weights
            all channels alike.
        aside: makes the place for codes outside memory; see `HeldRows`.

    Attributes:
        n_sampled_from: number of keys from which the sample was taken.
        codes: MXFP4 codes of the keys' components, and their powers of two.
    """

    def __init__(
        self,
        keys: mx.array,
        queries: mx.array | None = None,
        aside: MakeAside | None = None,
    ):
        """Compute the components from the sample, and start without codes."""
        B, H, self.n_sampled_from, D = keys.shape
        sample = keys.astype(mx.float32)
        size = _size(D)
        weights = mx.ones((B, H, 1, D)) if queries is None else _channel_sizes(queries, H)
        self._mean = sample.mean(axis=2, keepdims=True)
        centred = (sample - self._mean) * weights
        vectors = _principal(centred, size)
        # Keys are scaled so that the sample's components are at most 1, queries inversely: logits stay the same.
        largest = mx.maximum(mx.abs(centred @ vectors).max(axis=2, keepdims=True), 1e-6)
        padding = [(0, 0), (0, 0), (0, 0), (0, -size % MXFP4_GROUP)]
        self._of_keys = mx.pad(weights.swapaxes(-1, -2) * vectors / largest, padding)
        self._of_queries = mx.pad(vectors * largest / weights.swapaxes(-1, -2), padding)
        mx.async_eval(self._mean, self._of_keys, self._of_queries)
        self.codes = HeldRows(no_codes(keys), aside=aside)

    def __len__(self) -> int:
        """Return the number of keys that have codes."""
        return len(self.codes)

    @property
    def projection(self) -> mx.array:
        """Return the matrix from queries to the index's components, float32 `(B, n_kv_heads, head_dim, components)`."""
        return self._of_queries

    @property
    def nbytes(self) -> int:
        """Return the bytes in memory."""
        return self.codes.nbytes

    def reserve(self, n: int) -> None:
        """Make room for `n` keys, so that `append` copies no codes."""
        self.codes.reserve(n)

    def append(self, keys: mx.array) -> None:
        """Add the keys `(B, n_kv_heads, L, head_dim)` of the next tokens."""
        centred = keys.astype(mx.float32) - self._mean
        self.codes.append(mx.quantize(centred @ self._of_keys, **MXFP4))
        mx.eval(self.codes.in_memory)  # so that only one block takes memory

    def is_outgrown_by(self, n: int) -> bool:
        """Return whether `n` keys are at least twice as many as there were when the components were computed.

        Keys late in a text differ from early ones, if only by their rotation.
        """
        return n >= 2 * self.n_sampled_from

    def truncate(self, n: int) -> None:
        """Drop all codes but the first `n`."""
        self.codes.truncate(n)

    @property
    def state(self) -> list[mx.array]:
        """Return the arrays that a saved index has besides its codes."""
        return [self._mean, self._of_keys, self._of_queries]

    @classmethod
    def restored(cls, state: Any, keys: mx.array, aside: MakeAside) -> KeyIndex | None:
        """Return a saved index without codes, which `fill` adds; None if it does not fit keys of this shape."""
        index = cls.__new__(cls)
        B, H, _, D = keys.shape
        try:
            index._mean, index._of_keys, index._of_queries = state
            fits = index._mean.shape == (
                B,
                H,
                1,
                D,
            ) and index._of_keys.shape == index._of_queries.shape == (B, H, D, _padded(D))
        except (AttributeError, TypeError, ValueError):
            return None
        if not fits:
            return None
        index.codes = HeldRows(no_codes(keys), aside=aside)
        index.n_sampled_from = 0
        return index

    def fill(self, codes: Iterable[Stored]) -> None:
        """Append the codes of a saved index."""
        for some in codes:
            self.codes.append(some)
        self.n_sampled_from = len(self)

    def __deepcopy__(self, memo: dict) -> KeyIndex:
        """Copy the codes; the copy shares the components, which never change."""
        other = copy.copy(self)
        other.codes = copy.deepcopy(self.codes, memo)
        return other

    def relevance(self, observed: Queries, n: int) -> mx.array:
        """Score the first `n` keys by how near they come to a query's largest logit, in nats below it.

        The score is the maximum over queries and over the heads of a GQA group. It orders entries nearly as the
        softmax does, without exponentials. Every query sees all of the keys.

        Returns: `(B, n_kv_heads, n)` float32, at most 0; 0 is best.
        """
        queries = _scaled(observed.heads, observed.scale, self._mean.shape[1]) @ self._of_queries
        parts = list(self._parts(self._block(observed.heads), n))
        if 4 * math.prod(observed.heads.shape[:3]) * n <= self._logit_bytes:
            logits: list[mx.array] = []
            for part in parts:
                logits.append(self._logits(queries, *part, logits[-1:]))
            return _below(mx.concatenate(logits, axis=3))
        # Logits that are too large to be kept are computed twice: for the largest, then for the distances to it.
        tops: list[mx.array] = []
        for part in parts:
            tops.append(self._logits(queries, *part, tops[-1:]).max(axis=3, keepdims=True))
        top = mx.concatenate(tops, axis=3).max(axis=3, keepdims=True)
        below: list[mx.array] = []
        for part in parts:
            some = self._logits(queries, *part, below[-1:] or [top])
            below.append((some - top).max(axis=2))
        return mx.concatenate(below, axis=-1)

    def _parts(self, block: int, n: int) -> Iterator[tuple[int, int]]:
        """Yield spans `[start, stop)` of the first `n` keys, of at most `block` keys, whose codes are in one array."""
        for first, last in self.codes.spans(0, n):
            yield from spans(first, last, block)

    @property
    def _logit_bytes(self) -> int:
        return LOGIT_BYTES // LOGIT_DIVISOR_IN_FILES if self.codes.waits else LOGIT_BYTES

    def _block(self, heads: mx.array) -> int:
        """Return how many keys' logits to compute at once, for queries `(B, n_heads, m, head_dim)`."""
        return max(MXFP4_GROUP, self._logit_bytes // (4 * math.prod(heads.shape[:3])))

    def _logits(
        self, queries: mx.array, start: int, stop: int, after: Sequence[mx.array] = ()
    ) -> mx.array:
        """Return the logits of the keys `[start, stop)`, `(B, n_kv_heads, group * m, n)` float32.

        Args:
            queries: `(B, n_kv_heads, group * m, components)`, projected for the codes.
            start: first key.
            stop: position after the last key.
            after: arrays to compute first, so that fewer logits are in memory.
        """
        queries = mx.depends(queries, list(after)) if after else queries
        n = stop - start
        logits = _logits(n, queries, *self.codes.read_at_least(start, stop))
        if self.codes.waits:
            mx.eval(logits)
        return logits


def _channel_sizes(queries: mx.array, n_kv_heads: int) -> mx.array:
    """Return the root mean square of queries `(B, n_heads, m, head_dim)` by channel: `(B, n_kv_heads, 1, head_dim)`."""
    B, _, _, D = queries.shape
    squares = mx.square(queries.astype(mx.float32)).mean(axis=2).reshape(B, n_kv_heads, -1, D)
    return mx.sqrt(squares.mean(axis=2) + 1e-12)[:, :, None]


def _principal(centred: mx.array, n: int) -> mx.array:
    """Return the largest `n` principal components of `(B, n_kv_heads, m, head_dim)`: `(B, n_kv_heads, head_dim, n)`."""
    covariance = centred.swapaxes(-1, -2) @ centred / centred.shape[2]
    covariance = mx.where(mx.isfinite(covariance), covariance, 0)  # `eigh` would end the process
    _, vectors = mx.linalg.eigh(covariance, stream=mx.cpu)  # the smallest variance first
    return vectors[..., : -n - 1 : -1]


def _scaled(heads: mx.array, scale: float, n_kv_heads: int) -> mx.array:
    """Scale queries `(B, n_heads, m, head_dim)` and group them: `(B, n_kv_heads, group * m, head_dim)` float32."""
    B, _, _, D = heads.shape
    return (heads.astype(mx.float32) * scale).reshape(B, n_kv_heads, -1, D)


def _below(logits: mx.array) -> mx.array:
    """Return the maximum over queries of `logit - the query's top logit`, of logits `(B, n_kv_heads, group * m, n)`."""
    return (logits - logits.max(axis=3, keepdims=True)).max(axis=2)


def _logits(n: int, queries: mx.array, codes: mx.array, powers: mx.array) -> mx.array:
    """Return the logits of the first `n` keys of these codes: `(B, n_kv_heads, group * m, n)` float32."""
    return mx.quantized_matmul(queries, codes, powers, transpose=True, **MXFP4)[..., :n]


def no_codes(keys: mx.array) -> tuple[mx.array, ...]:
    """Return arrays of 0 codes and 0 powers of two, with the shapes and dtypes for these keys."""
    B, H, _, D = keys.shape
    return tuple(mx.zeros((B, H, 0, width), dtype) for width, dtype in _packed(D))


def index_bytes(keys: mx.array) -> int:
    """Return the bytes of an index of the keys `(B, n_kv_heads, n, head_dim)`, without free rows."""
    B, H, n, D = keys.shape
    return B * H * n * sum(width * dtype.size for width, dtype in _packed(D))


def _size(head_dim: int) -> int:
    """Return the number of components: half of the head's channels, in whole MXFP4 groups."""
    return min(head_dim, -(-head_dim // (2 * MXFP4_GROUP)) * MXFP4_GROUP)


def _padded(head_dim: int) -> int:
    """Return the number of components, padded to whole MXFP4 groups."""
    return -(-_size(head_dim) // MXFP4_GROUP) * MXFP4_GROUP


def _packed(head_dim: int) -> tuple[tuple[int, mx.Dtype], ...]:
    """Return width and dtype of a key's codes (eight codes per uint32), and of its powers of two."""
    width = _padded(head_dim)
    return (width // 8, mx.uint32), (width // MXFP4_GROUP, mx.uint8)
