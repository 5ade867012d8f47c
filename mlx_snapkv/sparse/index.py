"""An index of keys that ranks entries by attention without reading the keys themselves.

Loki (Singhania et al., 2024, arXiv:2406.02542) ranks keys by their first principal components. We first scale each
channel by the queries' magnitude in that channel, so that the components explain the variance of the logits. The index
keeps `head_dim / 2` components of 4 bits each, and takes 17/128 of the memory of bfloat16 keys. Half as many 8-bit
components would take the same memory, but would fail for models whose keys vary in all directions.

The codes are MXFP4 (OCP Microscaling Formats v1.0, section 5.1): 4-bit floats in groups of 32 that share a power of
two. MLX multiplies by these codes directly, in one operation. Integer codes with 16 evenly spaced levels rank slightly
better: of 6,000 entries, the 1/16 that they rank highest miss 12.0% of SmolLM2's attention, compared with 12.2% for
MXFP4 and 11.3% for exact logits. But they need two float32 copies of all codes for every token.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx

from ..entries.attention import FLOAT_BYTES
from ..entries.quantization import Stored
from ..entries.queries import Queries
from ..entries.spans import spans
from .growing_rows import GrowingRows, MakeSpill

# If there are at most this many entries, tokens rank them by exact attention. If there are more, they use an index.
EXACT_ENTRIES = 8192
MAX_SAMPLED_KEYS = 4096  # maximum number of keys sampled to compute the principal components
MXFP4: dict[str, Any] = {"mode": "mxfp4", "group_size": 32, "bits": 4}
MXFP4_GROUP = 32  # number of components that share a power of two
LOGIT_BYTES = 64 << 20  # maximum size of the float32 logits that are computed at once
LOGIT_DIVISOR_IN_FILES = 8  # divisor of `LOGIT_BYTES` if codes are in a file, to save memory


def ranks_by_index(n: int) -> bool:
    """Return whether a token ranks `n` entries by an index rather than by exact attention."""
    return n > EXACT_ENTRIES


class KeyIndex:
    """Codes of a layer's keys, in order of position.

    Args:
        keys: sample of keys that the components are computed from, `(B, n_kv_heads, n, head_dim)`. The sample itself is
            not indexed.
        queries: sample of queries that sets the channel weights, `(B, n_heads, m, head_dim)`, with the heads of a GQA
            group adjacent. None gives all channels the weight 1.
        make_spill: creates a file for codes that don't stay in memory; see `GrowingRows`.

    Attributes:
        n_keys_at_sampling: number of keys when the sample was taken, or when the index was loaded from a file.
        codes: MXFP4 codes of the keys' components, with their powers of two.
        query_projection: matrix that projects queries to components, float32 `(B, n_kv_heads, head_dim, components)`.
    """

    def __init__(
        self,
        keys: mx.array,
        queries: mx.array | None = None,
        make_spill: MakeSpill | None = None,
    ):
        """Compute the components from the samples. No key is indexed yet."""
        B, H, self.n_keys_at_sampling, D = keys.shape
        n_components = _n_components(D)
        channel_weights = mx.ones((B, H, 1, D))
        if queries is not None:
            channel_weights = _channel_magnitudes(queries, H)
        float32_keys = keys.astype(mx.float32)
        self._mean = float32_keys.mean(axis=2, keepdims=True)
        weighted_keys = (float32_keys - self._mean) * channel_weights
        n_directions = min(D, n_components)
        directions = _principal_directions(weighted_keys, n_directions)
        # Scale the keys so that no component of the sample exceeds 1, and the queries inversely, so that logits stay
        # the same.
        components = weighted_keys @ directions
        largest_component = mx.maximum(mx.abs(components).max(axis=2, keepdims=True), 1e-6)
        weight_column = channel_weights.swapaxes(-1, -2)
        padding = [(0, 0), (0, 0), (0, 0), (0, n_components - n_directions)]
        self._key_projection = mx.pad(weight_column * directions / largest_component, padding)
        self.query_projection = mx.pad(directions * largest_component / weight_column, padding)
        mx.async_eval(self._mean, self._key_projection, self.query_projection)
        self.codes = GrowingRows(empty_codes(keys), make_spill=make_spill)

    def __len__(self) -> int:
        """Return the number of indexed keys."""
        return len(self.codes)

    def append(self, keys: mx.array) -> None:
        """Index the next tokens' keys, `(B, n_kv_heads, L, head_dim)`."""
        centred_keys = keys.astype(mx.float32) - self._mean
        self.codes.append(mx.quantize(centred_keys @ self._key_projection, **MXFP4))
        # Evaluate now, so that the temporary arrays of only one call are in memory.
        mx.eval(self.codes.in_memory)

    def is_outgrown_by(self, n: int) -> bool:
        """Return whether `n` is at least twice the number of keys when the sample was taken.

        Keys added since then differ from the sampled ones, at least in their rotation by RoPE, so the components fit
        them less well.
        """
        return n >= 2 * self.n_keys_at_sampling

    @property
    def state(self) -> list[mx.array]:
        """Return the arrays to save, except for the codes, which are saved separately."""
        return [self._mean, self._key_projection, self.query_projection]

    @classmethod
    def from_state(cls, state: Any, keys: mx.array) -> KeyIndex | None:
        """Recreate a saved index without its codes, which `fill` adds.

        Return None if the state is damaged, or does not fit the shape of `keys`.
        """
        B, H, _, D = keys.shape
        try:
            mean, key_projection, query_projection = state
            shapes = [mean.shape, key_projection.shape, query_projection.shape]
        except (AttributeError, TypeError, ValueError):
            return None
        projection_shape = (B, H, D, _n_components(D))
        if shapes != [(B, H, 1, D), projection_shape, projection_shape]:
            return None
        index = cls.__new__(cls)
        index._mean = mean
        index._key_projection, index.query_projection = key_projection, query_projection
        index.codes = GrowingRows(empty_codes(keys))
        index.n_keys_at_sampling = 0  # set by `fill`
        return index

    def fill(self, code_blocks: Iterable[Stored], make_spill: MakeSpill) -> None:
        """Add the codes of a saved index. See `GrowingRows` for `make_spill`."""
        self.codes = GrowingRows(self.codes.between(0, 0), make_spill=make_spill)
        for codes in code_blocks:
            self.codes.append(codes)
        self.n_keys_at_sampling = len(self)

    def __deepcopy__(self, memo: dict) -> KeyIndex:
        """Copy the codes, but share the components, which never change."""
        other = copy.copy(self)
        other.codes = copy.deepcopy(self.codes, memo)
        return other

    def relevance(self, queries: Queries, n: int) -> mx.array:
        """Score the first `n` keys by how close their logits come to a query's largest logit.

        A key's score is its logit minus the query's largest logit, in nats, maximised over the queries and over the
        heads of the GQA group. The order is almost the same as with a softmax, but no exponentials are needed. There is
        no causal mask: every query sees all `n` keys.

        Returns: `(B, n_kv_heads, n)` float32, at most 0. Higher is better.
        """
        B, n_heads, n_queries, D = queries.vectors.shape
        n_kv_heads = self._mean.shape[1]
        scaled_queries = queries.vectors.astype(mx.float32) * queries.scale
        projected = scaled_queries.reshape(B, n_kv_heads, -1, D) @ self.query_projection
        logit_bytes_per_key = FLOAT_BYTES * B * n_heads * n_queries
        keys_at_once = max(MXFP4_GROUP, self._max_logit_bytes // logit_bytes_per_key)
        key_spans = list(self._key_spans(n, keys_at_once))
        all_logits_fit = logit_bytes_per_key * n <= self._max_logit_bytes
        if all_logits_fit:
            return self._relevance_in_one_pass(projected, key_spans)
        return self._relevance_in_two_passes(projected, key_spans)

    def _relevance_in_one_pass(
        self, projected: mx.array, key_spans: Sequence[tuple[int, int]]
    ) -> mx.array:
        """Compute `relevance` with the logits of all keys in memory."""
        span_logits: list[mx.array] = []
        for start, stop in key_spans:
            span_logits.append(self._logits(projected, start, stop, after=span_logits[-1:]))
        logits = mx.concatenate(span_logits, axis=3)
        top = logits.max(axis=3, keepdims=True)
        return (logits - top).max(axis=2)

    def _relevance_in_two_passes(
        self, projected: mx.array, key_spans: Sequence[tuple[int, int]]
    ) -> mx.array:
        """Compute `relevance` with the logits of only one span in memory at a time.

        All logits are computed twice: first to find their maximum, then to score the keys.
        """
        span_tops: list[mx.array] = []
        for start, stop in key_spans:
            after = span_tops[-1:]
            # Don't keep a reference to the logits, or those of two spans will be in memory at once.
            span_tops.append(self._logits(projected, start, stop, after).max(axis=3, keepdims=True))
        top = mx.concatenate(span_tops, axis=3).max(axis=3, keepdims=True)
        distances: list[mx.array] = []
        for start, stop in key_spans:
            logits = self._logits(projected, start, stop, after=distances[-1:] or [top])
            distances.append((logits - top).max(axis=2))
        return mx.concatenate(distances, axis=-1)

    def _key_spans(self, n: int, keys_at_once: int) -> Iterator[tuple[int, int]]:
        """Split the first `n` keys into spans of at most `keys_at_once`. A span's codes are in a single array."""
        for start, stop in self.codes.spans(0, n):
            yield from spans(start, stop, keys_at_once)

    @property
    def _max_logit_bytes(self) -> int:
        return LOGIT_BYTES // LOGIT_DIVISOR_IN_FILES if self.codes.reads_allocate else LOGIT_BYTES

    def _logits(
        self, projected: mx.array, start: int, stop: int, after: Sequence[mx.array] = ()
    ) -> mx.array:
        """Return the logits of keys `[start, stop)`, `(B, n_kv_heads, group * m, n)` float32.

        Args:
            projected: `m` queries per head, projected to components, `(B, n_kv_heads, group * m, components)`.
            start: first key.
            stop: position after the last key.
            after: arrays to evaluate first, so that only one span is processed at a time.
        """
        if after:
            projected = mx.depends(projected, list(after))
        codes, powers = self.codes.read_at_least(start, stop)
        all_logits = mx.quantized_matmul(projected, codes, powers, transpose=True, **MXFP4)
        logits = all_logits[..., : stop - start]
        if self.codes.reads_allocate:
            mx.eval(logits)
        return logits


def _channel_magnitudes(queries: mx.array, n_kv_heads: int) -> mx.array:
    """Return the RMS of each channel over the queries, `(B, n_kv_heads, 1, head_dim)`.

    Args:
        queries: `(B, n_heads, m, head_dim)`, with the heads of a GQA group adjacent.
        n_kv_heads: number of KV heads.
    """
    B, _, _, D = queries.shape
    mean_squares = mx.square(queries.astype(mx.float32)).mean(axis=2)
    mean_squares_of_group = mean_squares.reshape(B, n_kv_heads, -1, D).mean(axis=2)
    return mx.sqrt(mean_squares_of_group + 1e-12)[:, :, None]


def _principal_directions(centred_keys: mx.array, n: int) -> mx.array:
    """Return the keys' first `n` principal components, `(B, n_kv_heads, head_dim, n)`.

    Args:
        centred_keys: keys with a mean of 0, `(B, n_kv_heads, m, head_dim)`.
        n: number of components.
    """
    n_keys = centred_keys.shape[2]
    covariance = centred_keys.swapaxes(-1, -2) @ centred_keys / n_keys
    # `eigh` aborts the process if a number is infinite or NaN.
    covariance = mx.where(mx.isfinite(covariance), covariance, 0)
    _, eigenvectors = mx.linalg.eigh(covariance, stream=mx.cpu)  # ascending variance
    return eigenvectors[..., : -n - 1 : -1]  # the last `n`, largest variance first


def empty_codes(keys: mx.array) -> tuple[mx.array, ...]:
    """Return empty arrays of codes and powers of two for keys of this shape."""
    B, H, _, D = keys.shape
    return tuple(mx.zeros((B, H, 0, width), dtype) for width, dtype in _packed_formats(D))


def index_bytes(keys: mx.array) -> int:
    """Return the size in bytes of an index for keys `(B, n_kv_heads, n, head_dim)`."""
    B, H, n, D = keys.shape
    bytes_per_key = sum(width * dtype.size for width, dtype in _packed_formats(D))
    return B * H * n * bytes_per_key


def _n_components(head_dim: int) -> int:
    """Return the number of components: half of `head_dim`, rounded up to whole MXFP4 groups.

    If that is more than `head_dim`, the extra components are 0.
    """
    n_groups = math.ceil(head_dim / 2 / MXFP4_GROUP)
    return n_groups * MXFP4_GROUP


def _packed_formats(head_dim: int) -> tuple[tuple[int, mx.Dtype], ...]:
    """Return (width, dtype) of a key's codes, eight to a uint32, and of its powers of two."""
    n_components = _n_components(head_dim)
    return (n_components // 8, mx.uint32), (n_components // MXFP4_GROUP, mx.uint8)
