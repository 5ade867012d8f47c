"""The attention that observed queries give to each entry of a layer; keys are `(B, n_kv_heads, T, head_dim)`.

Functions build lazy graphs. For a long prompt they work block by block: a few queries of one KV head at a time, with
all of its entries, so that a softmax is one operation. `mx.depends` makes each block wait for the block before it. The
blocks are small, because MLX allocates the results of some operations ahead of time.

Half-precision keys are multiplied as a float32 copy of one head's keys, because MLX would round the products to the
keys' type. Logits may exceed float16, which ends at 65,504 (Qwen2.5's do, whose keys have large biases), and bfloat16
has three digits, too few to rank large logits. For the many queries of a vote, copying the keys costs less than
converting the logits would. For the few queries of an answer's token, the copy makes it read five times the bytes, but
only of few entries: larger numbers are ranked by an index (`sparse.index.ranks_by_index`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from ..errors import SnapKVError
from .queries import Queries
from .spans import spans

# Bytes of float32 numbers computed at a time: larger blocks take more memory, and with smaller blocks the launches on a
# GPU, one for each operation on a block, would take most of the time of a vote.
BLOCK_BYTES = 8 << 20
ONE_PASS_BYTES = 64 << 20  # most bytes of logits and float32 keys that are computed in one block

# The logit of an entry that a query does not see. It is finite, because the difference of two infinities is NaN.
HIDDEN = -1e30


@dataclass(frozen=True)
class KeyReader:
    """Keys that are read when they are needed, from memory or files.

    Attributes:
        shape: `(B, n_kv_heads, T, head_dim)`.
        read: `read(heads, after)` returns all keys of a slice of the KV heads, computed after the arrays `after`.
    """

    shape: tuple[int, int, int, int]
    dtype: mx.Dtype
    read: Callable[[slice, Sequence[mx.array]], mx.array]


Keys = mx.array | KeyReader


def attention_votes(keys: Keys, observed: Queries) -> mx.array:
    """Return SnapKV's votes (section 3, "Voting"), `(B, n_kv_heads, T)` float32.

    They are softmax weights over all entries up to a query's own position, summed over the observed queries and
    averaged over the query heads of a GQA group.
    """
    return latest_votes(keys, observed, [len(observed.places)])[0]


def latest_votes(keys: Keys, observed: Queries, counts: Sequence[int]) -> mx.array:
    """Return `attention_votes` of the last queries, for each number of queries in `counts`, in one pass over the keys.

    The result is `(len(counts), B, n_kv_heads, T)` float32.
    """
    n_queries = len(observed.places)
    group = _group(keys, observed)
    is_late = np.arange(n_queries) >= n_queries - np.array(counts)[:, None]
    # `(len(counts), group * n_queries)`: 1 for a query that a count includes, otherwise 0.
    late = mx.array(np.tile(is_late, (1, group)).astype(np.float32))
    votes = _summed(keys, observed, lambda weights, rows: late[:, rows] @ weights)
    return mx.moveaxis(votes, 2, 0) / group


def above_average(keys: Keys, observed: Queries) -> mx.array:
    """Return how many queries give each entry at least the average weight: 1/t for a query that sees t entries.

    The result is `(B, n_kv_heads, T)` float32, averaged over the query heads of a GQA group.
    """
    group = _group(keys, observed)
    n_seen = np.minimum(_own_places(observed, group) + 1, keys.shape[2])
    average = mx.array((1 / n_seen[:, None]).astype(np.float32))

    def count(weights: mx.array, rows: slice) -> mx.array:
        return (weights >= average[rows]).sum(axis=2, keepdims=True)

    return _summed(keys, observed, count).squeeze(2) / group


def attention_weights(keys: Keys, observed: Queries) -> mx.array:
    """Return the softmax weights of each query, `(B, n_heads, n, T)` float32."""
    group = _group(keys, observed)
    all_rows = slice(0, group * len(observed.places))
    weights: list[mx.array] = []
    for heads, _ in _blocks(keys, observed):
        copied = _copied(keys, heads, weights[-1:])
        weights.append(_weights(copied, _of_kv_heads(observed, heads, group), all_rows))
    return mx.concatenate(weights, axis=1).reshape(*observed.heads.shape[:3], -1)


def _summed(
    keys: Keys, observed: Queries, sum_queries: Callable[[mx.array, slice], mx.array]
) -> mx.array:
    """Return `sum_queries(weights, rows)` summed over all blocks of queries, `(B, n_kv_heads, m, T)`.

    Args:
        keys: `(B, n_kv_heads, T, head_dim)`.
        observed: `n_queries` queries of every query head, with their positions.
        sum_queries: takes the softmax weights `(B, n, n_rows, T)` of some KV heads, and which `rows` of all
            `group * n_queries` they are; returns `(B, n, m, T)`.
    """
    group = _group(keys, observed)
    sums: list[mx.array] = []
    for heads, row_blocks in _blocks(keys, observed):
        copied = _copied(keys, heads, sums[-1:])
        of_heads = _of_kv_heads(observed, heads, group)
        total: list[mx.array] = []
        for rows in row_blocks:
            part = sum_queries(_weights(copied, of_heads, rows, after=total), rows)
            total = [total[0] + part if total else part]
        sums += total
    return mx.concatenate(sums, axis=1)


def _blocks(keys: Keys, observed: Queries) -> Iterator[tuple[slice, list[slice]]]:
    """Yield KV heads and the blocks of their queries, as slices of `n_kv_heads` and of `group * n_queries`.

    All heads and queries are one block if their logits and copied keys take few bytes.
    """
    B, H, T, D = keys.shape
    n_rows = _group(keys, observed) * len(observed.places)
    floats_per_copied_key = 0 if keys.dtype == mx.float32 else D
    if 4 * B * H * T * (n_rows + floats_per_copied_key) <= ONE_PASS_BYTES:
        yield slice(0, H), [slice(0, n_rows)]
        return
    size = max(1, BLOCK_BYTES // (4 * B * T))
    for head in range(H):
        yield slice(head, head + 1), [slice(*span) for span in spans(0, n_rows, size)]


def _copied(keys: Keys, heads: slice, after: Sequence[mx.array]) -> mx.array:
    """Return a float32 copy of the keys of some KV heads, made after `after`."""
    if isinstance(keys, KeyReader):
        return keys.read(heads, after).astype(mx.float32)
    return mx.depends(keys[:, heads], list(after)).astype(mx.float32)


def _of_kv_heads(observed: Queries, heads: slice, group: int) -> Queries:
    """Return the queries and sinks, in float32, of the query heads that read the KV heads `heads`."""
    readers = slice(group * heads.start, group * heads.stop)
    sinks = None if observed.sinks is None else observed.sinks[readers].astype(mx.float32)
    return replace(observed, heads=observed.heads[:, readers].astype(mx.float32), sinks=sinks)


def _weights(
    keys: mx.array, observed: Queries, rows: slice, after: Sequence[mx.array] = ()
) -> mx.array:
    """Return causal softmax weights, `(B, n_kv_heads, n_rows, T)` float32, computed after `after`.

    Args:
        keys: `(B, n_kv_heads, T, head_dim)` float32.
        observed: the queries of these heads, float32, with their positions and attention sinks.
        rows: which of each KV head's `group * n_queries` queries.
        after: results that are computed before.
    """
    logits = _logits(keys, observed, rows, after)
    if observed.sinks is None:
        return mx.softmax(logits, axis=-1)
    # A sink takes a share of the softmax, like one more entry.
    by_query = mx.repeat(observed.sinks, len(observed.places))
    sinks = by_query.reshape(1, keys.shape[1], -1, 1)[:, :, rows]
    sinks = mx.broadcast_to(sinks, (*logits.shape[:3], 1))
    return mx.softmax(mx.concatenate([logits, sinks], axis=-1), axis=-1)[..., :-1]


def _logits(keys: mx.array, observed: Queries, rows: slice, after: Sequence[mx.array]) -> mx.array:
    """Return causally masked logits; arguments as for `_weights`."""
    B, H, T, D = keys.shape
    queries = observed.heads.reshape(B, H, -1, D)[:, :, rows]
    # The scale follows the product, because GPUs may round float32 factors to TensorFloat-32, which has the digits of
    # float16: half-precision queries and keys lose nothing, but scaled queries would.
    logits = (mx.depends(queries, list(after)) @ keys.mT) * observed.scale
    if observed.cap is not None:
        logits = observed.cap * mx.tanh(logits / observed.cap)
    if observed.places.start + 1 >= T:  # the first query sees all entries, and so do the others
        return logits
    own_places = mx.array(_own_places(observed, _group(keys, observed))[rows, None])
    is_seen = (
        mx.array(np.arange(T, dtype=np.int32)) <= own_places
    )  # from the host, which launches nothing
    return mx.where(is_seen, logits, HIDDEN)


def _group(keys: Keys, observed: Queries) -> int:
    """Return the number of query heads per KV head."""
    return observed.heads.shape[1] // keys.shape[1]


def _own_places(observed: Queries, group: int) -> np.ndarray:
    """Return the index of each query's own entry, `(group * n_queries,)`."""
    return np.tile(np.array(observed.places, np.int32), group)


def block_size(entry_bytes: int) -> int:
    """Return how many entries of `entry_bytes` fit in `BLOCK_BYTES`; at least 64."""
    return max(64, BLOCK_BYTES // entry_bytes)


def nan_scores() -> SnapKVError:
    """Return the error of scores that are NaN."""
    return SnapKVError("the entries' scores contain NaN, so the model's attention produced NaN")
