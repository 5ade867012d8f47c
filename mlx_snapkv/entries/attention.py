"""The attention that observed queries give to each entry of a layer; keys are `(B, n_kv_heads, T, head_dim)`.

Functions build lazy graphs. For a long prompt they work block by block, and `mx.depends` makes each block wait for the
block before it. The blocks are small, because MLX allocates the results of some operations ahead of time.

Half-precision keys are multiplied as a float32 copy of a block, because MLX would round the products to the keys' type.
Logits may exceed float16, which ends at 65,504 (Qwen2.5's do, whose keys have large biases), and bfloat16 has three
digits, too few to rank large logits. For the many queries of a vote, copying the keys costs less than converting the
logits would. For the few queries of an answer's token, the copy makes it read five times the bytes, but only of few
entries: larger numbers are ranked by an index (`sparse.index.ranks_by_index`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from ..errors import SnapKVError
from .queries import Queries
from .spans import spans

# Bytes of float32 numbers computed at a time: larger blocks take more memory, and with smaller blocks the launches on a
# GPU, one for each operation on a block, would take most of the time of a vote.
BLOCK_BYTES = 8 << 20
ONE_PASS_BYTES = 64 << 20  # most bytes of logits and float32 keys that are computed in one block
READ_BYTES = 16 << 20  # bytes of float32 logits per block if each read of keys is waited for
READ_TOKENS = 4096  # most keys read at a time, so that longer prompts take no more memory
KEPT_BYTES = 64 << 20  # most bytes of logits that are kept, so that the keys are read once

# The softmax uses powers of two, which a CPU computes in a third of the time of exp.
LOG2_E = 1.4426950408889634

# The logit of an entry that a query does not see. It is finite, because a query may see no entry of a block.
HIDDEN = -1e30


@dataclass(frozen=True)
class KeyBlocks:
    """Keys that are read a block at a time, from memory or files.

    Attributes:
        shape: `(B, n_kv_heads, T, head_dim)`.
        read: `read(start, stop, after)` returns the keys of `[start, stop)`, computed after the arrays `after`.
        waits: whether reading allocates memory, so that each block must be computed before the next is read.
    """

    shape: tuple[int, int, int, int]
    dtype: mx.Dtype
    read: Callable[[int, int, Sequence[mx.array]], mx.array]
    waits: bool


Keys = mx.array | KeyBlocks


class LogSum(NamedTuple):
    """The logarithm to base 2 of a softmax's denominator, as the sum of two numbers, `top + rest`.

    One float32 would not do: next to a logit of 10^5 it has no digits left for the other number.

    Attributes:
        top: the largest logit, `(B, n_kv_heads, group * n)`.
        rest: the logarithm of the sum of `2 ** (logit - top)` over all logits, of the same shape.
    """

    top: mx.array
    rest: mx.array

    def share(self, logits: mx.array) -> mx.array:
        """Return the logarithms of the softmax weights of logits `(B, n_kv_heads, group * n, T)`."""
        return (logits - self.top[..., None]) - self.rest[..., None]


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
    B, H, T, D = keys.shape
    floats_per_copied_key = 0 if keys.dtype == mx.float32 else D
    floats_per_entry = group * n_queries + floats_per_copied_key
    fits_one_block = not _waits(keys) and 4 * B * H * T * floats_per_entry <= ONE_PASS_BYTES
    # `(len(counts), group * n_queries)`: 1 for a query that a count includes, otherwise 0.
    is_late = mx.arange(n_queries) >= n_queries - mx.array(list(counts))[:, None]
    late = mx.tile(is_late.astype(mx.float32), (1, group))
    if fits_one_block:
        weights, factors = _unnormalised_weights(keys, observed, block=T)
        factors = factors[..., None, :]
        # For a decoded token all queries vote, and each operation takes time.
        if list(counts) != [n_queries]:
            factors = factors * late
        votes = factors @ weights
    else:
        votes = _sums(keys, observed, lambda logs: late @ mx.power(2, logs))
    return mx.moveaxis(votes, 2, 0) / group


def above_average(keys: Keys, observed: Queries) -> mx.array:
    """Return how many queries give each entry at least the average weight: 1/t for a query that sees t entries.

    The result is `(B, n_kv_heads, T)` float32, averaged over the query heads of a GQA group.
    """
    group = _group(keys, observed)
    n_seen = mx.minimum(_own_places(observed, group) + 1, keys.shape[2])
    log_average = -mx.log2(n_seen.astype(mx.float32))[:, None]
    return _sums(keys, observed, lambda logs: (logs >= log_average).sum(axis=2)) / group


def attention_weights(keys: Keys, observed: Queries) -> mx.array:
    """Return the softmax weights of each query, `(B, n_heads, n, T)` float32."""
    block = _block(_grouped(keys, observed))
    weights, factors = _unnormalised_weights(keys, observed, block)
    return (weights * factors[..., None]).reshape(*observed.heads.shape[:3], -1)


def _unnormalised_weights(keys: Keys, observed: Queries, block: int) -> tuple[mx.array, mx.array]:
    """Return unnormalised weights `2 ** (logit - top)`, and the factor per query that normalises them.

    `top` is the query's largest logit. The product of both is the softmax, in which attention sinks take part.

    Args:
        keys: `(B, n_kv_heads, T, head_dim)`.
        observed: `n` queries of every query head, with their positions.
        block: number of entries whose logits are computed at a time.

    Returns:
        The weights, `(B, n_kv_heads, group * n, T)`, and the factors, `(B, n_kv_heads, group * n)`.
    """
    queries = _grouped(keys, observed)
    T = keys.shape[2]
    blocks = [(0, T)] if block >= T else _spans(observed, T, block)
    parts: list[mx.array] = []
    for span in blocks:
        parts.append(_logits(keys, observed, queries, span, after=parts[-1:]))
    logits = mx.concatenate(parts, axis=-1)
    top = logits.max(axis=-1)
    weights = mx.power(2, logits - top[..., None])
    sums = weights.sum(axis=-1)
    if observed.sinks is None:
        factors = 1 / sums
    else:
        total = _with_sinks(observed, LogSum(top=top, rest=mx.log2(sums)))
        factors = mx.power(2, total.share(top[..., None]))[..., 0]
    return weights, factors


def _sums(keys: Keys, observed: Queries, sum_queries: Callable[[mx.array], mx.array]) -> mx.array:
    """Return `sum_queries` of the weights' logarithms to base 2, block by block, joined along the last axis.

    The keys are read once for the softmax's denominators and once more for the sums, unless all logits can be kept.

    Args:
        keys: `(B, n_kv_heads, T, head_dim)`; may be read block by block.
        observed: `n` queries of every query head, with their positions.
        sum_queries: takes logarithms `(B, n_kv_heads, group * n, block)`; its result's last axis is `block`, too.
    """
    queries = _grouped(keys, observed)
    B, H, n_per_kv_head, D = queries.shape
    T = keys.shape[2]
    keeps_logits = n_per_kv_head <= D // 4 and 4 * B * H * n_per_kv_head * T <= KEPT_BYTES
    block = min(READ_TOKENS, _block(queries, READ_BYTES)) if _waits(keys) else _block(queries)
    spans = list(_spans(observed, T, block))
    # If there are few queries, one array can hold the logits of several blocks of keys.
    blocks_per_group = max(1, D // 2 // n_per_kv_head) if keeps_logits else 1
    groups = [spans[i : i + blocks_per_group] for i in range(0, len(spans), blocks_per_group)]
    total, kept_logits = _denominators(keys, observed, queries, groups, keeps_logits)
    latest = list(total)  # results that the next block waits for
    sums: list[mx.array] = []
    for i, group in enumerate(groups):
        if keeps_logits:
            logits = kept_logits[i]
        else:
            [span] = group
            logits = _logits(keys, observed, queries, span, after=latest)
        sums.append(sum_queries(total.share(logits)))
        latest = sums[-1:]
        _finish_block(keys, latest)
    return mx.concatenate(sums, axis=-1)


def _denominators(
    keys: Keys,
    observed: Queries,
    queries: mx.array,
    groups: Sequence[Sequence[tuple[int, int]]],
    keeps_logits: bool,
) -> tuple[LogSum, list[mx.array]]:
    """Return the denominators of the softmax over all entries, and the logits of each group if `keeps_logits`.

    Args:
        keys: `(B, n_kv_heads, T, head_dim)`; may be read block by block.
        observed: the queries before grouping, for their positions and attention sinks.
        queries: as `_grouped` returns them.
        groups: successive blocks `[start, stop)`; the logits of a group's blocks are joined in one array.
        keeps_logits: whether to return the logits, which then need not be computed again.
    """
    kept_logits: list[mx.array] = []
    of_groups: list[LogSum] = []
    latest: list[mx.array] = []  # results that the next block waits for
    for group in groups:
        parts: list[mx.array] = []
        for span in group:
            parts.append(_logits(keys, observed, queries, span, after=latest))
            latest = parts[-1:]
            _finish_block(keys, latest)
        logits = mx.concatenate(parts, axis=-1)
        of_groups.append(_log_sum(logits))
        latest = list(of_groups[-1])
        _finish_block(keys, latest)
        if keeps_logits:
            kept_logits.append(logits)
    return _with_sinks(observed, _log_sum_of_parts(of_groups)), kept_logits


def _finish_block(keys: Keys, results: list[mx.array]) -> None:
    """Compute the results of a block of keys, if this must precede the next block's reading."""
    if _waits(keys):
        mx.eval(results)


def _log_sum(logits: mx.array) -> LogSum:
    """Return the log-sum-exp to base 2 of logits along the last axis: `log2(sum(2 ** logits))`."""
    top = logits.max(axis=-1)
    powers = mx.power(2, logits - top[..., None])
    return LogSum(top=top, rest=mx.log2(powers.sum(axis=-1)))


def _log_sum_of_parts(parts: Sequence[LogSum]) -> LogSum:
    """Return the log-sum-exp to base 2 of all logits from those of their parts: `log2(sum(2 ** (top + rest)))`."""
    tops = mx.stack([part.top for part in parts])
    rests = mx.stack([part.rest for part in parts])
    top = tops.max(axis=0)
    powers = mx.power(2, tops - top + rests)
    return LogSum(top=top, rest=mx.log2(powers.sum(axis=0)))


def _with_sinks(observed: Queries, total: LogSum) -> LogSum:
    """Return the denominators with the part of the attention sinks added."""
    if observed.sinks is None:
        return total
    _, n_kv_heads, n_per_kv_head = total.top.shape
    by_head = (observed.sinks.astype(mx.float32) * LOG2_E).reshape(1, n_kv_heads, -1)
    n_queries = n_per_kv_head // by_head.shape[2]
    by_query = mx.repeat(by_head, n_queries, axis=2)
    logits = mx.broadcast_to(by_query, total.top.shape)
    sinks = LogSum(top=logits, rest=mx.zeros_like(logits))
    return _log_sum_of_parts([total, sinks])


def _group(keys: Keys, observed: Queries) -> int:
    """Return the number of query heads per KV head."""
    return observed.heads.shape[1] // keys.shape[1]


def _grouped(keys: Keys, observed: Queries) -> mx.array:
    """Return the queries as `_logits` takes them, `(B, n_kv_heads, group * n, head_dim)` float32."""
    B, H, _, D = keys.shape
    return observed.heads.astype(mx.float32).reshape(B, H, -1, D)


def _waits(keys: Keys) -> bool:
    """Return whether each block must be computed before the next is read."""
    return isinstance(keys, KeyBlocks) and keys.waits


def block_size(entry_bytes: int, n_bytes: int | None = None) -> int:
    """Return how many entries of `entry_bytes` fit in `n_bytes`, by default `BLOCK_BYTES`; at least 64."""
    return max(64, (n_bytes or BLOCK_BYTES) // entry_bytes)


def _block(queries: mx.array, n_bytes: int | None = None) -> int:
    """Return the number of entries per block; with few queries, the float32 keys limit it, not the logits."""
    B, H, n, D = queries.shape
    return block_size(4 * B * H * max(n, D // 2), n_bytes)


def _spans(observed: Queries, T: int, block: int) -> Iterator[tuple[int, int]]:
    """Yield blocks `[start, stop)` of `T` entries, split where the causal mask begins."""
    seen_by_all = max(0, min(T, observed.places.start + 1))
    yield from spans(0, seen_by_all, block)
    yield from spans(seen_by_all, T, block)


def _logits(
    keys: Keys,
    observed: Queries,
    queries: mx.array,
    span: tuple[int, int],
    after: Sequence[mx.array] = (),
) -> mx.array:
    """Return causally masked logits of a span, `(B, n_kv_heads, group * n, stop - start)`, computed after `after`.

    They are multiplied by log2(e), so that powers of two make the softmax.
    """
    start, stop = span
    if isinstance(keys, KeyBlocks):
        part = keys.read(start, stop, after)
    else:
        part = mx.depends(keys[:, :, start:stop], list(after))
    # The scale follows the product, because GPUs may round float32 factors to TensorFloat-32, which has the digits of
    # float16: half-precision queries and keys lose nothing, but scaled queries would.
    logits = (queries @ part.astype(mx.float32).mT) * (observed.scale * LOG2_E)
    if observed.cap is not None:
        cap = observed.cap * LOG2_E
        logits = cap * mx.tanh(logits / cap)
    first_sees_all = stop <= observed.places.start + 1  # and the queries after it do, too
    if first_sees_all:
        return logits
    own_places = _own_places(observed, group=queries.shape[2] // len(observed.places))
    is_seen = mx.arange(start, stop) <= own_places[:, None]
    return mx.where(is_seen, logits, HIDDEN)


def _own_places(observed: Queries, group: int) -> mx.array:
    """Return the index of each query's own entry, `(group * n,)`, in the order of `_grouped`."""
    return mx.tile(mx.arange(observed.places.start, observed.places.stop), group)


def nan_scores() -> SnapKVError:
    """Return the error of scores that are NaN."""
    return SnapKVError("the entries' scores contain NaN, so the model's attention produced NaN")
