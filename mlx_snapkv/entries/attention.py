"""Compute how much attention the voting queries pay to a layer's entries.

Keys are `(B, n_kv_heads, T, head_dim)`, and all functions build lazy graphs. A long prompt is processed in blocks. Each
block takes a few queries of one KV head and all of the head's keys, so that the softmax is a single operation.
`mx.depends` makes each block wait for the previous one. Blocks are small because MLX allocates some results in advance.

Keys are copied to float32, one head at a time, because MLX rounds the product of half-precision arrays to their dtype.
float16 overflows above 65,504, which the logits of Qwen2.5 exceed because its keys have large biases, and the three
digits of bfloat16 are too few to rank large logits. A vote has many queries, so copying the keys is cheaper than
converting the logits. A decoded token has few queries, and the copy makes it read five times as many bytes. This only
happens for short texts, because an index ranks the entries of longer ones (`sparse.index.ranks_by_index`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ..errors import SnapKVError
from .queries import Queries
from .spans import spans

# Size of the float32 arrays of one step. Larger blocks need more memory. With smaller ones, a vote on a GPU would spend
# most of its time launching operations.
BLOCK_BYTES = 8 << 20
ONE_PASS_BYTES = 64 << 20  # up to this size, logits and float32 keys are computed in one step

# Logit of an entry that a query must not see. It is finite because subtracting two infinities gives NaN.
HIDDEN = -1e30


@dataclass(frozen=True)
class KeyReader:
    """Keys that are read on demand, from memory or from files.

    Attributes:
        shape: `(B, n_kv_heads, T, head_dim)`.
        read: `read(heads, after)` returns all keys of a slice of the KV heads. The arrays `after` are evaluated first.
    """

    shape: tuple[int, int, int, int]
    dtype: mx.Dtype
    read: Callable[[slice, Sequence[mx.array]], mx.array]


Keys = mx.array | KeyReader


def attention_votes(keys: Keys, observed: Queries) -> mx.array:
    """Compute SnapKV's votes (section 3, "Voting"), `(B, n_kv_heads, T)` float32.

    Votes are causal softmax weights, summed over the queries and averaged over the query heads of each GQA group.
    """
    return latest_votes(keys, observed, [len(observed.indices)])[0]


def latest_votes(keys: Keys, observed: Queries, counts: Sequence[int]) -> mx.array:
    """Compute `attention_votes` of the last `n` queries for each `n` in `counts`, in one pass over the keys.

    Returns: `(len(counts), B, n_kv_heads, T)` float32.
    """
    n_queries = len(observed.indices)
    group = _group(keys, observed)
    is_late = np.arange(n_queries) >= n_queries - np.array(counts)[:, None]
    # `(len(counts), group * n_queries)`: 1 for queries that the count includes, otherwise 0.
    late = mx.array(np.tile(is_late, (1, group)).astype(np.float32))
    votes = _sum_over_blocks(keys, observed, lambda weights, rows: late[:, rows] @ weights)
    return mx.moveaxis(votes, 2, 0) / group


def above_average(keys: Keys, observed: Queries) -> mx.array:
    """Count the queries that give each entry at least the average weight.

    The average weight is 1/t for a query that sees t entries.

    Returns: `(B, n_kv_heads, T)` float32, averaged over the query heads of each GQA group.
    """
    group = _group(keys, observed)
    n_seen = np.minimum(_own_indices(observed, group) + 1, keys.shape[2])
    average = mx.array((1 / n_seen[:, None]).astype(np.float32))

    def count(weights: mx.array, rows: slice) -> mx.array:
        return (weights >= average[rows]).sum(axis=2, keepdims=True)

    return _sum_over_blocks(keys, observed, count).squeeze(2) / group


def attention_weights(keys: Keys, observed: Queries) -> mx.array:
    """Compute the softmax weights of each query, `(B, n_heads, n, T)` float32."""
    group = _group(keys, observed)
    all_rows = slice(0, group * len(observed.indices))
    weights: list[mx.array] = []
    for heads, _ in _blocks(keys, observed):
        float32_keys = _float32_keys(keys, heads, weights[-1:])
        weights.append(_weights(float32_keys, _queries_of(observed, heads, group), all_rows))
    return mx.concatenate(weights, axis=1).reshape(*observed.vectors.shape[:3], -1)


def _sum_over_blocks(
    keys: Keys, observed: Queries, sum_queries: Callable[[mx.array, slice], mx.array]
) -> mx.array:
    """Add up `sum_queries(weights, rows)` over all blocks of queries: `(B, n_kv_heads, m, T)`.

    Args:
        keys: `(B, n_kv_heads, T, head_dim)`.
        observed: the queries with their indices.
        sum_queries: takes the softmax weights `(B, n, n_rows, T)` of a block of `n` KV heads, and the block's slice
            `rows` of the `group * n_queries` queries per KV head. Returns `(B, n, m, T)`.
    """
    group = _group(keys, observed)
    sums: list[mx.array] = []
    for heads, row_blocks in _blocks(keys, observed):
        float32_keys = _float32_keys(keys, heads, sums[-1:])
        head_queries = _queries_of(observed, heads, group)
        total: list[mx.array] = []
        for rows in row_blocks:
            part = sum_queries(_weights(float32_keys, head_queries, rows, after=total), rows)
            total = [total[0] + part if total else part]
        sums += total
    return mx.concatenate(sums, axis=1)


def _blocks(keys: Keys, observed: Queries) -> Iterator[tuple[slice, list[slice]]]:
    """Yield slices of the KV heads, each with slices of its `group * n_queries` queries.

    If all logits and copied keys fit in `ONE_PASS_BYTES`, there is a single block of all heads and queries.
    """
    B, H, T, D = keys.shape
    n_rows = _group(keys, observed) * len(observed.indices)
    floats_per_copied_key = 0 if keys.dtype == mx.float32 else D
    if 4 * B * H * T * (n_rows + floats_per_copied_key) <= ONE_PASS_BYTES:
        yield slice(0, H), [slice(0, n_rows)]
        return
    size = max(1, BLOCK_BYTES // (4 * B * T))
    for head in range(H):
        yield slice(head, head + 1), [slice(*span) for span in spans(0, n_rows, size)]


def _float32_keys(keys: Keys, heads: slice, after: Sequence[mx.array]) -> mx.array:
    """Copy the keys of some KV heads to float32. The arrays `after` are evaluated first."""
    if isinstance(keys, KeyReader):
        return keys.read(heads, after).astype(mx.float32)
    return mx.depends(keys[:, heads], list(after)).astype(mx.float32)


def _queries_of(observed: Queries, heads: slice, group: int) -> Queries:
    """Return the queries and sinks of the query heads that read the KV heads `heads`, as float32."""
    readers = slice(group * heads.start, group * heads.stop)
    sinks = None if observed.sinks is None else observed.sinks[readers].astype(mx.float32)
    return replace(observed, vectors=observed.vectors[:, readers].astype(mx.float32), sinks=sinks)


def _weights(
    keys: mx.array, observed: Queries, rows: slice, after: Sequence[mx.array] = ()
) -> mx.array:
    """Compute causal softmax weights, `(B, n_kv_heads, n_rows, T)` float32.

    Args:
        keys: `(B, n_kv_heads, T, head_dim)` float32.
        observed: the float32 queries of these heads.
        rows: slice of each KV head's `group * n_queries` queries.
        after: arrays to evaluate first.
    """
    logits = _logits(keys, observed, rows, after)
    if observed.sinks is None:
        return mx.softmax(logits, axis=-1)
    # A sink takes a share of the softmax, as if it were another entry.
    by_query = mx.repeat(observed.sinks, len(observed.indices))
    sinks = by_query.reshape(1, keys.shape[1], -1, 1)[:, :, rows]
    sinks = mx.broadcast_to(sinks, (*logits.shape[:3], 1))
    return mx.softmax(mx.concatenate([logits, sinks], axis=-1), axis=-1)[..., :-1]


def _logits(keys: mx.array, observed: Queries, rows: slice, after: Sequence[mx.array]) -> mx.array:
    """Compute causally masked logits; see `_weights` for the arguments."""
    B, H, T, D = keys.shape
    queries = observed.vectors.reshape(B, H, -1, D)[:, :, rows]
    # Scale the product, not the queries. GPUs may round float32 factors to TensorFloat-32, which represents
    # half-precision queries and keys exactly, but not scaled queries.
    logits = (mx.depends(queries, list(after)) @ keys.mT) * observed.scale
    if observed.cap is not None:
        logits = observed.cap * mx.tanh(logits / observed.cap)
    if observed.indices.start + 1 >= T:  # all queries see all entries
        return logits
    own_indices = mx.array(_own_indices(observed, _group(keys, observed))[rows, None])
    # Compute the row of indices on the host, which saves launching an operation.
    is_seen = mx.array(np.arange(T, dtype=np.int32)) <= own_indices
    return mx.where(is_seen, logits, HIDDEN)


def _group(keys: Keys, observed: Queries) -> int:
    """Return the number of query heads per KV head."""
    return observed.vectors.shape[1] // keys.shape[1]


def _own_indices(observed: Queries, group: int) -> np.ndarray:
    """Return the index of each query's own entry, `(group * n_queries,)`."""
    return np.tile(np.array(observed.indices, np.int32), group)


def block_size(entry_bytes: int) -> int:
    """Return how many entries of `entry_bytes` bytes fit in `BLOCK_BYTES`, but at least 64."""
    return max(64, BLOCK_BYTES // entry_bytes)


def nan_scores() -> SnapKVError:
    """Build the error for scores that contain NaN."""
    return SnapKVError("the entries' scores contain NaN, so the model's attention produced NaN")
