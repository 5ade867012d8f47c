"""Compute how much attention the voting queries pay to a layer's entries.

All functions build lazy graphs. A long prompt is processed in blocks. Each block takes a few queries of one KV head and
all of the head's keys, so that the softmax is a single operation. `mx.depends` makes each block wait for the previous
one. Even so, MLX allocates the results of some later blocks in advance, so blocks are small.

Keys are copied to float32, one head at a time, because MLX rounds the product of half-precision arrays to their dtype.
float16 overflows above 65,504, and Qwen2.5's logits are larger than that because its keys have large biases. bfloat16
has fewer than three significant digits, too few to rank large logits.

A vote on a prompt has many queries. For these, copying the keys costs less than converting the logits of a
half-precision product to float32 would. A decoded token has few queries, and for these the copy is expensive: five
times as many bytes are read or written. With sparse attention, only short texts pay this price, because the entries of
longer texts are ranked by an index (`sparse.index.ranks_by_index`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ..errors import SnapKVError
from .queries import Queries
from .spans import spans

FLOAT_BYTES = 4
# Size of a block's float32 arrays. Larger blocks need more memory. With smaller blocks, a vote on a GPU would spend
# most of its time launching operations.
BLOCK_BYTES = 8 << 20
ONE_PASS_BYTES = 64 << 20  # up to this size, all logits and float32 keys form a single block

# Logit of an entry that a query must not see. It is finite because subtracting two infinities gives NaN.
HIDDEN_LOGIT = -1e30


@dataclass(frozen=True)
class KeyReader:
    """Keys that are read on demand, from memory or from files.

    Attributes:
        shape: `(B, n_kv_heads, T, head_dim)`.
        read: `read(heads, after)` returns all keys of the KV heads in the slice `heads`. The arrays `after` are
            evaluated first.
    """

    shape: tuple[int, int, int, int]
    dtype: mx.Dtype
    read: Callable[[slice, Sequence[mx.array]], mx.array]


def attention_votes(keys: KeyReader, queries: Queries) -> mx.array:
    """Compute SnapKV's votes (section 3 of its paper, "Voting"), `(B, n_kv_heads, T)` float32.

    Votes are causal softmax weights, summed over the queries and averaged over the query heads of each GQA group.
    """
    n_queries = len(queries.indices)
    return latest_votes(keys, queries, voter_counts=[n_queries])[0]


def latest_votes(keys: KeyReader, queries: Queries, voter_counts: Sequence[int]) -> mx.array:
    """Compute `attention_votes` of the last `n` queries for each `n` in `voter_counts`, in one pass over the keys.

    Returns: `(len(voter_counts), B, n_kv_heads, T)` float32.
    """
    n_queries = len(queries.indices)
    group_size = _group_size(keys, queries)
    first_voters = n_queries - np.array(voter_counts)[:, None]
    is_voter = np.arange(n_queries) >= first_voters
    # `voter_mask` is `(len(voter_counts), group_size * n_queries)`. It repeats `is_voter` for each query head of a GQA
    # group, because the same tokens' queries vote in every head.
    voter_mask = mx.array(np.tile(is_voter, (1, group_size)).astype(np.float32))

    def sum_of_voters(weights: mx.array, rows: slice) -> mx.array:
        return voter_mask[:, rows] @ weights

    votes_by_count = _sum_over_blocks(keys, queries, sum_of_voters)
    return mx.moveaxis(votes_by_count, 2, 0) / group_size


def count_above_average(keys: KeyReader, queries: Queries) -> mx.array:
    """Count, for each entry, the queries that give it at least the average weight.

    The average weight is 1/t for a query that sees t entries.

    Returns: `(B, n_kv_heads, T)` float32, averaged over the query heads of each GQA group.
    """
    group_size = _group_size(keys, queries)
    n_entries = keys.shape[2]
    n_visible = np.minimum(_last_visible_indices(queries, group_size) + 1, n_entries)
    average_weights = mx.array((1 / n_visible[:, None]).astype(np.float32))

    def count_queries(weights: mx.array, rows: slice) -> mx.array:
        return (weights >= average_weights[rows]).sum(axis=2, keepdims=True)

    return _sum_over_blocks(keys, queries, count_queries).squeeze(2) / group_size


def attention_weights(keys: KeyReader, queries: Queries) -> mx.array:
    """Compute the softmax weights of each query, `(B, n_heads, n, T)` float32."""
    group_size = _group_size(keys, queries)
    all_rows = slice(0, group_size * len(queries.indices))
    weights: list[mx.array] = []
    for kv_heads, _ in _blocks(keys, queries):
        block_keys = keys.read(kv_heads, weights[-1:]).astype(mx.float32)
        block_queries = _float32_queries(queries, kv_heads, group_size)
        weights.append(_softmax_weights(block_keys, block_queries, all_rows))
    return mx.concatenate(weights, axis=1).reshape(*queries.vectors.shape[:3], -1)


def _sum_over_blocks(
    keys: KeyReader, queries: Queries, sum_queries: Callable[[mx.array, slice], mx.array]
) -> mx.array:
    """Add up `sum_queries(weights, rows)` over each KV head's blocks of queries.

    Args:
        keys: reads keys `(B, n_kv_heads, T, head_dim)`.
        queries: the queries with their indices.
        sum_queries: takes a block's softmax weights `(B, n, n_rows, T)` for `n` KV heads, and `rows`, the block's slice
            of each KV head's `group_size * n_queries` queries. Returns `(B, n, m, T)`, where `m` is the same for all
            blocks.

    Returns: `(B, n_kv_heads, m, T)`.
    """
    group_size = _group_size(keys, queries)
    sums: list[mx.array] = []  # one per slice of KV heads
    for kv_heads, row_blocks in _blocks(keys, queries):
        block_keys = keys.read(kv_heads, sums[-1:]).astype(mx.float32)
        block_queries = _float32_queries(queries, kv_heads, group_size)
        # Don't keep a reference to the weights, or those of two blocks will be in memory at once.
        first_rows, *other_rows = row_blocks
        total = sum_queries(_softmax_weights(block_keys, block_queries, first_rows), first_rows)
        for rows in other_rows:
            total = total + sum_queries(
                _softmax_weights(block_keys, block_queries, rows, after=[total]), rows
            )
        sums.append(total)
    return mx.concatenate(sums, axis=1)


def _blocks(keys: KeyReader, queries: Queries) -> Iterator[tuple[slice, list[slice]]]:
    """Yield blocks of queries: a slice of the KV heads, and slices of each head's `group_size * n_queries` queries.

    If all logits and copied keys fit in `ONE_PASS_BYTES`, there is a single block of all heads and queries.
    """
    B, H, T, D = keys.shape
    n_rows = _group_size(keys, queries) * len(queries.indices)  # queries per KV head
    # Half-precision keys are copied to float32.
    copied_floats_per_key = 0 if keys.dtype == mx.float32 else D
    bytes_of_one_pass = FLOAT_BYTES * B * H * T * (n_rows + copied_floats_per_key)
    if bytes_of_one_pass <= ONE_PASS_BYTES:
        yield slice(0, H), [slice(0, n_rows)]
        return
    rows_per_block = max(1, BLOCK_BYTES // (FLOAT_BYTES * B * T))
    row_blocks = [slice(*span) for span in spans(0, n_rows, rows_per_block)]
    for head in range(H):
        yield slice(head, head + 1), row_blocks


def _float32_queries(queries: Queries, kv_heads: slice, group_size: int) -> Queries:
    """Return the queries and sinks of the heads that share the given KV heads, as float32."""
    query_heads = slice(group_size * kv_heads.start, group_size * kv_heads.stop)
    vectors = queries.vectors[:, query_heads].astype(mx.float32)
    sinks = None
    if queries.sinks is not None:
        sinks = queries.sinks[query_heads].astype(mx.float32)
    return replace(queries, vectors=vectors, sinks=sinks)


def _softmax_weights(
    keys: mx.array, queries: Queries, rows: slice, after: Sequence[mx.array] = ()
) -> mx.array:
    """Compute causal softmax weights, `(B, n_kv_heads, n_rows, T)` float32.

    Args:
        keys: `(B, n_kv_heads, T, head_dim)` float32.
        queries: float32 queries for the same heads.
        rows: slice of each KV head's `group_size * n_queries` queries.
        after: arrays to evaluate first.
    """
    logits = _masked_logits(keys, queries, rows, after)
    if queries.sinks is None:
        return mx.softmax(logits, axis=-1)
    # A sink takes a share of the softmax, as if it were another entry.
    sink_of_each_query = mx.repeat(queries.sinks, len(queries.indices))
    sink_logits = sink_of_each_query.reshape(1, keys.shape[1], -1, 1)[:, :, rows]
    sink_logits = mx.broadcast_to(sink_logits, (*logits.shape[:3], 1))
    weights = mx.softmax(mx.concatenate([logits, sink_logits], axis=-1), axis=-1)
    return weights[..., :-1]  # drop the sink's weight


def _masked_logits(
    keys: mx.array, queries: Queries, rows: slice, after: Sequence[mx.array]
) -> mx.array:
    """Compute causally masked logits; see `_softmax_weights` for the arguments."""
    B, H, T, D = keys.shape
    vectors = queries.vectors.reshape(B, H, -1, D)[:, :, rows]
    # Scale the product, not the queries. GPUs may round float32 factors to TensorFloat-32, which represents
    # half-precision queries and keys exactly, but not scaled queries.
    logits = (mx.depends(vectors, list(after)) @ keys.mT) * queries.scale
    if queries.logit_cap is not None:
        logits = queries.logit_cap * mx.tanh(logits / queries.logit_cap)
    all_see_all_entries = queries.indices.start + 1 >= T
    if all_see_all_entries:
        return logits
    group_size = queries.vectors.shape[1] // H
    last_visible = _last_visible_indices(queries, group_size)
    # Compute the row of indices on the host, to save launching an operation.
    indices = mx.array(np.arange(T, dtype=np.int32))
    is_visible = indices <= mx.array(last_visible[rows, None])
    return mx.where(is_visible, logits, HIDDEN_LOGIT)


def _group_size(keys: KeyReader, queries: Queries) -> int:
    """Return the number of query heads per KV head."""
    return queries.vectors.shape[1] // keys.shape[1]


def _last_visible_indices(queries: Queries, group_size: int) -> np.ndarray:
    """Return the index of the last entry that each query sees (its own), `(group_size * n_queries,)`."""
    return np.tile(np.array(queries.indices, np.int32), group_size)


def entries_per_block(entry_bytes: int) -> int:
    """Return how many entries of `entry_bytes` bytes fit in `BLOCK_BYTES`, with a minimum of 64."""
    return max(64, BLOCK_BYTES // entry_bytes)


def nan_scores_error() -> SnapKVError:
    """Build the error for scores that contain NaN."""
    return SnapKVError("the entries' scores contain NaN, so the model's attention produced NaN")
