"""An index of keys: which entries queries attend to most, found without reading the keys.

Loki (Singhania et al., 2024, arXiv:2406.02542) ranks keys by their first principal components. Here a channel counts
by how large queries are in it, so that the components are those of the logits' variance: half of `head_dim`, in 4 bits
each, 17/128 of the keys' bytes in bfloat16. A quarter of the components in 8 bits each costs as much, and loses
models that look entries up by keys that vary in all directions.

The codes are the OCP's MXFP4 (Microscaling Formats v1.0, section 5.1): floats of 4 bits, 32 of which share a power of
two. MLX multiplies by them as they are stored, in one operation. Sixteen even steps a component rank a little better
(1/16 of 6,000 entries lacks 12.0% of SmolLM2's attention, with MXFP4 12.2%, with exact logits 11.3%), and cost two
float32 expansions of all codes a token.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from ..entries.attention import nan_scores
from ..entries.quantization import Stored, join
from ..entries.queries import Queries
from ..entries.spans import spans
from .compiled import compiled
from .held_rows import HeldRows, MakeAside

EXACT_ENTRIES = 8192  # a token ranks as many entries by its exact attention, and more by an index
KEYS_QUANTISED_AT_ONCE = 4096  # MLX's CPU backend takes 50 bytes of memory for each number of a key
MAX_SAMPLED_KEYS = 4096  # keys that the components should be taken from, at most
MXFP4: dict[str, Any] = {"mode": "mxfp4", "group_size": 32, "bits": 4}
MXFP4_GROUP = 32  # components that share a power of two
LOGIT_BYTES = 64 << 20  # of float32 logits, below which all are made at once
LOGIT_DIVISOR_IN_FILES = 8  # times, where codes are in a file: its reader counts on little memory


def ranks_by_index(n: int) -> bool:
    """Return whether a token ranks `n` entries by an index of their keys."""
    return n > EXACT_ENTRIES


class KeyIndex:
    """Codes of a layer's keys, in order of position.

    Args:
        keys: `(B, n_kv_heads, n, head_dim)`, of which the components are taken; they are not appended.
        queries: `(B, n_heads, m, head_dim)`, each KV head's readers together; None: all channels count alike.
        aside: see `HeldRows`.

    Raises: SnapKVError: the keys contain NaN.

    Attributes:
        n_made_of: how many keys there were, of which those were a sample.
        codes: of the keys, and their powers of two.
    """

    def __init__(
        self,
        keys: mx.array,
        queries: mx.array | None = None,
        aside: MakeAside | None = None,
    ):
        B, H, self.n_made_of, D = keys.shape
        sample, size = keys.astype(mx.float32), _size(D)
        if mx.isnan(sample).any().item():
            raise nan_scores()
        weights = mx.ones((B, H, 1, D)) if queries is None else _channel_sizes(queries, H)
        self._mean = sample.mean(axis=2, keepdims=True)
        centred = (sample - self._mean) * weights
        vectors = _principal(centred, size)
        # The components of the sample are scaled to 1 at most, and those of queries so that logits stay as they are.
        largest = mx.maximum(mx.abs(centred @ vectors).max(axis=2, keepdims=True), 1e-6)
        padding = [(0, 0), (0, 0), (0, 0), (0, -size % MXFP4_GROUP)]
        self._of_keys = mx.pad(weights.swapaxes(-1, -2) * vectors / largest, padding)
        self._of_queries = mx.pad(vectors * largest / weights.swapaxes(-1, -2), padding)
        mx.eval(self._mean, self._of_keys, self._of_queries)
        self.codes = HeldRows(no_codes(keys), aside=aside)

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.codes.nbytes

    def append(self, keys: mx.array) -> None:
        """Add the keys `(B, n_kv_heads, L, head_dim)` of the next tokens."""
        new = []
        for start, stop in spans(0, keys.shape[2], KEYS_QUANTISED_AT_ONCE):
            own = keys[:, :, start:stop].astype(mx.float32) - self._mean
            new.append(mx.quantize(own @ self._of_keys, **MXFP4))
            mx.eval(new[-1])
        self.codes.append(join(*new))
        mx.eval(self.codes.in_memory)

    def outgrown_by(self, n: int) -> bool:
        """Whether `n` keys are too many for an index of these components: twice as many as they were taken of.

        Keys late in a text differ from early ones, if only by their rotation.
        """
        return n >= 2 * self.n_made_of

    def truncate(self, n: int) -> None:
        self.codes.truncate(n)

    @property
    def state(self) -> list[mx.array]:
        """All but the codes, for a file."""
        return [self._mean, self._of_keys, self._of_queries]

    @classmethod
    def restored(cls, state: Any, keys: mx.array, aside: MakeAside) -> KeyIndex | None:
        """Return the index of a file, for keys of this shape, to which `fill` adds codes; None if it does not fit."""
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
        index.codes, index.n_made_of = HeldRows(no_codes(keys), aside=aside), 0
        return index

    def fill(self, codes: Iterable[Stored]) -> None:
        """Add codes that an index with the same state had."""
        for some in codes:
            self.codes.append(some)
        self.n_made_of = len(self)

    def __deepcopy__(self, memo: dict) -> KeyIndex:
        other = copy.copy(self)
        other.codes = copy.deepcopy(self.codes, memo)
        return other

    def relevance(self, observed: Queries, n: int) -> mx.array:
        """How near each of the first `n` keys comes to the largest logit of any of the queries.

        In nats below it, so that 0 is the best: the maximum over queries, and over a GQA group. It orders entries
        nearly as the softmax does, and takes no exponentials. The queries see all of the keys.

        Returns: `(B, n_kv_heads, n)` float32, 0 at most.
        """
        if self.codes.together(n) and n <= self._block(observed.heads):
            codes = self.codes.reach(0, n)
            return _relevance(observed.heads, observed.scale, self._of_queries, n, *codes)
        queries = _scaled(observed.heads, observed.scale, self._mean.shape[1]) @ self._of_queries
        parts = list(self._parts(self._block(observed.heads), n))
        if 4 * math.prod(observed.heads.shape[:3]) * n <= self._logit_bytes:
            made: list[mx.array] = []
            for part in parts:
                made.append(self._logits(queries, *part, made[-1:]))
            return _below(mx.concatenate(made, axis=3))
        # Made twice, since they are too many to be kept.
        tops: list[mx.array] = []
        for part in parts:
            tops.append(self._logits(queries, *part, tops[-1:]).max(axis=3, keepdims=True))
        most = mx.concatenate(tops, axis=3).max(axis=3, keepdims=True)
        below: list[mx.array] = []
        for part in parts:
            logits = self._logits(queries, *part, below[-1:] or [most])
            below.append((logits - most).max(axis=2))
        return mx.concatenate(below, axis=-1)

    def _parts(self, block: int, n: int) -> Iterator[tuple[int, int]]:
        """Yield spans `[start, stop)` of the first `n` keys, of `block` keys at most, whose codes lie together."""
        for first, last in self.codes.spans(0, n):
            yield from spans(first, last, block)

    @property
    def _logit_bytes(self) -> int:
        return LOGIT_BYTES // LOGIT_DIVISOR_IN_FILES if self.codes.waits else LOGIT_BYTES

    def _block(self, heads: mx.array) -> int:
        """Keys whose logits are made at once, at most, for queries `(B, n_heads, m, head_dim)`."""
        return max(MXFP4_GROUP, self._logit_bytes // (4 * math.prod(heads.shape[:3])))

    def _logits(
        self, queries: mx.array, start: int, stop: int, after: Sequence[mx.array] = ()
    ) -> mx.array:
        """Return the logits of the keys `[start, stop)`, `(B, n_kv_heads, group * m, n)` float32.

        Args:
            queries: `(B, n_kv_heads, group * m, components)`, as they multiply the codes.
            after: what is computed before.
        """
        queries = mx.depends(queries, list(after)) if after else queries
        n = stop - start
        logits = _logits(n, queries, *self.codes.reach(start, stop))
        if self.codes.waits:
            mx.eval(logits)
        return logits


def _channel_sizes(queries: mx.array, n_kv_heads: int) -> mx.array:
    """Root mean squares of a KV head's queries `(B, n_heads, m, head_dim)`: `(B, n_kv_heads, 1, head_dim)`."""
    B, _, _, D = queries.shape
    squares = mx.square(queries.astype(mx.float32)).mean(axis=2).reshape(B, n_kv_heads, -1, D)
    return mx.sqrt(squares.mean(axis=2) + 1e-12)[:, :, None]


def _principal(centred: mx.array, n: int) -> mx.array:
    """The `n` principal components of `(B, n_kv_heads, m, head_dim)`: `(B, n_kv_heads, head_dim, n)`, largest first."""
    covariance = centred.swapaxes(-1, -2) @ centred / centred.shape[2]
    _, vectors = mx.linalg.eigh(covariance, stream=mx.cpu)  # by ascending variance
    return vectors[..., : -n - 1 : -1]


def _scaled(heads: mx.array, scale: float, n_kv_heads: int) -> mx.array:
    """Queries `(B, n_heads, m, head_dim)` by KV head, `(B, n_kv_heads, group * m, head_dim)` float32."""
    B, _, _, D = heads.shape
    return (heads.astype(mx.float32) * scale).reshape(B, n_kv_heads, -1, D)


@compiled
def _relevance(
    heads: mx.array, scale: float, factors: mx.array, n: int, codes: mx.array, powers: mx.array
) -> mx.array:
    """`KeyIndex.relevance` of the first `n` keys of codes that lie together."""
    queries = _scaled(heads, scale, factors.shape[1]) @ factors
    return _below(_logits(n, queries, codes, powers))


def _below(logits: mx.array) -> mx.array:
    """How near any query's logit of a key comes to its largest, of `(B, n_kv_heads, group * m, n)`."""
    return (logits - logits.max(axis=3, keepdims=True)).max(axis=2)


def _logits(n: int, queries: mx.array, codes: mx.array, powers: mx.array) -> mx.array:
    """Return the logits of the first `n` keys of these codes: `(B, n_kv_heads, group * m, n)` float32."""
    return mx.quantized_matmul(queries, codes, powers, transpose=True, **MXFP4)[..., :n]


def no_codes(keys: mx.array) -> tuple[mx.array, ...]:
    """Codes and powers of two of none of the keys, to show their forms."""
    B, H, _, D = keys.shape
    return tuple(mx.zeros((B, H, 0, width), dtype) for width, dtype in _packed(D))


def index_bytes(keys: mx.array) -> int:
    """Bytes that an index of the keys `(B, n_kv_heads, n, head_dim)` takes, without the room for more."""
    B, H, n, D = keys.shape
    return B * H * n * sum(width * dtype.size for width, dtype in _packed(D))


def _size(head_dim: int) -> int:
    """Components that are held."""
    return min(head_dim, -(-head_dim // (2 * MXFP4_GROUP)) * MXFP4_GROUP)


def _padded(head_dim: int) -> int:
    return -(-_size(head_dim) // MXFP4_GROUP) * MXFP4_GROUP


def _packed(head_dim: int) -> tuple[tuple[int, mx.Dtype], ...]:
    """A key's numbers of codes, eight in one, and of powers of two, and their types."""
    width = _padded(head_dim)
    return (width // 8, mx.uint32), (width // MXFP4_GROUP, mx.uint8)
