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
    n, group = len(observed.places), _group(keys, observed)
    B, H, T, D = keys.shape
    floats_per_entry = group * n + (0 if keys.dtype == mx.float32 else D)
    in_one_pass = not _waits(keys) and 4 * B * H * T * floats_per_entry <= ONE_PASS_BYTES
    is_late = mx.arange(n) >= n - mx.array(list(counts))[:, None]
    is_late = mx.tile(is_late.astype(mx.float32), (1, group))
    if in_one_pass:
        weights, factors = _weights(keys, observed, T)
        factors = factors[..., None, :]
        if list(counts) != [
            n
        ]:  # for a decoded token, all queries vote, and each operation takes time
            factors = factors * is_late
        votes = factors @ weights
    else:
        votes = _sums(keys, observed, lambda logs: is_late @ mx.power(2, logs))
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
    weights, factors = _weights(keys, observed, _block(_grouped(keys, observed)))
    return (weights * factors[..., None]).reshape(*observed.heads.shape[:3], -1)


def _weights(keys: Keys, observed: Queries, block: int) -> tuple[mx.array, mx.array]:
    """Return weights `(B, n_kv_heads, group * n, T)`, and factors `(B, n_kv_heads, group * n)` that make a softmax.

    Args:
        block: number of entries whose logits are computed at a time.
    """
    queries, T = _grouped(keys, observed), keys.shape[2]
    parts: list[mx.array] = []
    for span in [(0, T)] if block >= T else _spans(observed, T, block):
        parts.append(_logits(keys, observed, queries, span, parts[-1:]))
    logits = mx.concatenate(parts, axis=-1)
    top = logits.max(axis=-1)
    weights = mx.power(2, logits - top[..., None])
    if observed.sinks is None:
        return weights, 1 / weights.sum(axis=-1)
    total = _with_sinks(observed, LogSum(top, mx.log2(weights.sum(axis=-1))))
    return weights, mx.power(2, total.share(top[..., None]))[..., 0]


def _sums(keys: Keys, observed: Queries, summed: Callable[[mx.array], mx.array]) -> mx.array:
    """Return `summed` of the weights' logarithms to base 2, block by block, joined along the last axis.

    The keys are read once for the softmax's denominators and once more for the sums, unless all logits can be kept.

    Args:
        summed: takes logarithms `(B, n_kv_heads, group * n, block)`; its result's last axis is `block`, too.
    """

    def computed(x: mx.array) -> mx.array:
        if waits:
            mx.eval(x)
        return x

    B, H, T, D = keys.shape
    queries = _grouped(keys, observed)
    n, waits = queries.shape[2], _waits(keys)
    keeps = n <= D // 4 and 4 * B * H * n * T <= KEPT_BYTES
    block = min(READ_TOKENS, _block(queries, READ_BYTES)) if waits else _block(queries)
    # With few queries, one array can hold the logits of several blocks of keys.
    together = max(1, D // 2 // n) if keeps else 1
    spans = list(_spans(observed, T, block))
    groups = [spans[i : i + together] for i in range(0, len(spans), together)]
    kept: list[mx.array] = []
    sums: list[LogSum] = []
    for group in groups:
        parts: list[mx.array] = []
        for span in group:
            after = parts[-1:] or list(sums[-1] if sums else ())
            parts.append(computed(_logits(keys, observed, queries, span, after)))
        logits = mx.concatenate(parts, axis=-1)
        sums.append(LogSum(*map(computed, _log_sum(logits))))
        if keeps:
            kept.append(logits)
    total = _with_sinks(observed, _joined(sums))
    votes: list[mx.array] = []
    for i, (span, *_) in enumerate(groups):
        after = votes[-1:] or list(total)
        logits = kept[i] if keeps else _logits(keys, observed, queries, span, after)
        votes.append(computed(summed(total.share(logits))))
    return mx.concatenate(votes, axis=-1)


class LogSum(NamedTuple):
    """The logarithm to base 2 of a softmax's denominator, as the sum of two numbers.

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


def _log_sum(logits: mx.array) -> LogSum:
    """Return the denominator of a softmax along the last axis."""
    top = logits.max(axis=-1)
    return LogSum(top, mx.log2(mx.power(2, logits - top[..., None]).sum(axis=-1)))


def _joined(sums: Sequence[LogSum]) -> LogSum:
    """Return the denominator of all logits from the denominators of their parts."""
    tops = mx.stack([part.top for part in sums])
    top = tops.max(axis=0)
    powers = mx.power(2, tops - top + mx.stack([part.rest for part in sums]))
    return LogSum(top, mx.log2(powers.sum(axis=0)))


def _with_sinks(observed: Queries, total: LogSum) -> LogSum:
    """Return the denominators with the part of the attention sinks added."""
    if observed.sinks is None:
        return total
    _, H, n = total.top.shape
    sinks = (observed.sinks.astype(mx.float32) * LOG2_E).reshape(1, H, -1)
    sinks = mx.broadcast_to(mx.repeat(sinks, n // sinks.shape[2], axis=2), total.top.shape)
    return _joined([total, LogSum(sinks, mx.zeros_like(sinks))])


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
    """Return causally masked logits of a span, `(B, n_kv_heads, group * n, stop - start)`, computed after `after`."""
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
    if stop <= observed.places.start + 1:
        return logits
    own = _own_places(observed, queries.shape[2] // len(observed.places))
    return mx.where(mx.arange(start, stop) <= own[:, None], logits, HIDDEN)


def _own_places(observed: Queries, group: int) -> mx.array:
    """Return the index of each query's own entry, `(group * n,)`, in the order of `_grouped`."""
    return mx.tile(mx.arange(observed.places.start, observed.places.stop), group)


def nan_scores() -> SnapKVError:
    """Return the error of scores that are NaN."""
    return SnapKVError("the entries' scores contain NaN, so the model's attention produced NaN")
