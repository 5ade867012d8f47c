"""How much attention observed queries give to every entry of a layer; keys are `(B, n_kv_heads, T, head_dim)`.

Only graphs are made here. Where a prompt is long they are made block by block, and `mx.depends` lets each block wait
for the one before it. MLX allocates some operations ahead of the one that it computes, so the blocks are small.

Half-precision keys are multiplied as a float32 copy of a block. MLX would round their products to their own type:
float16 ends at 65,504, which logits may pass (those of Qwen2.5, whose keys have large biases), and bfloat16 has three
digits, too few to rank large logits by. For the many queries of a vote the copy takes less than converting the logits
would. A token of the answer, of few queries, reads five times the bytes so, but of few entries: more are ranked by an
index (`key_index.ranks_by_index`).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from ..errors import SnapKVError
from .queries import Queries
from .spans import spans

# Bytes of float32 logits made at a time. Every operation on a block is a launch on a GPU, and of smaller blocks the
# launches would take most of a vote's time.
BLOCK_BYTES = 8 << 20  # bytes of float32 numbers computed at a time: larger blocks take more memory
ONE_PASS_BYTES = 64 << 20  # of logits and float32 keys, below which they are made in one block
READ_BYTES = 16 << 20  # the same of keys that are read from elsewhere, each time with a wait
READ_TOKENS = 4096  # keys read at a time, so that the memory is the same for any longer prompt
KEPT_BYTES = 64 << 20  # of logits, below which the keys' blocks are read once; if queries are few

# Softmax by powers of two, which a CPU takes in a third of the time of exp.
LOG2_E = 1.4426950408889634

# The logit of what a query does not see: finite, since a block may hold nothing else for it.
HIDDEN = -1e30


@dataclass(frozen=True)
class KeyBlocks:
    """Keys `(B, n_kv_heads, T, head_dim)` that are read a block at a time, from wherever they are."""

    shape: tuple[int, int, int, int]
    dtype: mx.Dtype
    read: Callable[[int, int, Sequence[mx.array]], mx.array]  # from start to stop, after these
    waits: bool  # what is read takes memory, so that each block is computed before the next is read


Keys = mx.array | KeyBlocks


def attention_votes(keys: Keys, observed: Queries) -> mx.array:
    """SnapKV's votes (section 3, "Voting"): `(B, n_kv_heads, T)` float32.

    Softmax over all entries up to the query's own position, summed over the observed queries, averaged over
    the query heads of a GQA group.
    """
    return latest_votes(keys, observed, [len(observed.places)])[0]


def latest_votes(keys: Keys, observed: Queries, counts: Sequence[int]) -> mx.array:
    """`attention_votes` of the last queries, as many as each of the `counts`: `(len(counts), B, n_kv_heads, T)`.

    One pass over the keys makes all.
    """
    n, group = len(observed.places), _group(keys, observed)
    B, H, T, D = keys.shape
    held = group * n + (0 if keys.dtype == mx.float32 else D)
    in_one = not _waits(keys) and 4 * B * H * T * held <= ONE_PASS_BYTES
    late = mx.arange(n) >= n - mx.array(list(counts))[:, None]
    late = mx.tile(late.astype(mx.float32), (1, group))
    if in_one:
        weights, share = _weights(keys, observed, T)
        share = share[..., None, :]
        if list(counts) != [n]:  # or every operation counts: of all queries, as for a decoded token
            share = share * late
        votes = share @ weights
    else:
        votes = _sums(keys, observed, lambda logs: late @ mx.power(2, logs))
    return mx.moveaxis(votes, 2, 0) / group


def above_average(keys: Keys, observed: Queries) -> mx.array:
    """How many queries give each entry at least 1/t of their attention, of t entries that they see.

    `(B, n_kv_heads, T)` float32, averaged over the query heads of a GQA group.
    """
    group = _group(keys, observed)
    seen = mx.minimum(_own_places(observed, group) + 1, keys.shape[2])
    least = -mx.log2(seen.astype(mx.float32))[:, None]
    return _sums(keys, observed, lambda logs: (logs >= least).sum(axis=2)) / group


def attention_weights(keys: Keys, observed: Queries) -> mx.array:
    """Every query's own weights `(B, n_heads, n, T)` float32: `attention_votes` before any sum."""
    weights, share = _weights(keys, observed, _block(_grouped(keys, observed)))
    return (weights * share[..., None]).reshape(*observed.heads.shape[:3], -1)


def _weights(keys: Keys, observed: Queries, block: int) -> tuple[mx.array, mx.array]:
    """All weights `(B, n_kv_heads, group * n, T)`, and their factor `(B, n_kv_heads, group * n)` to be a softmax."""
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
    """`summed` of the logarithms, base 2, of weights, `(B, n_kv_heads, group * n, block)` to `(..., block)`, joined.

    The keys are read for the softmax's denominators and once more for the sums, unless all logits can be kept.
    """

    def made(x: mx.array) -> mx.array:
        if waits:
            mx.eval(x)
        return x

    B, H, T, D = keys.shape
    queries = _grouped(keys, observed)
    n, waits = queries.shape[2], _waits(keys)
    keeps = n <= D // 4 and 4 * B * H * n * T <= KEPT_BYTES
    block = min(READ_TOKENS, _block(queries, READ_BYTES)) if waits else _block(queries)
    # Of few queries, the logits of several blocks of keys are as much as those of one block of many.
    together = max(1, D // 2 // n) if keeps else 1
    spans = list(_spans(observed, T, block))
    groups = [spans[i : i + together] for i in range(0, len(spans), together)]
    kept: list[mx.array] = []
    sums: list[LogSum] = []
    for group in groups:
        parts: list[mx.array] = []
        for span in group:
            after = parts[-1:] or list(sums[-1] if sums else ())
            parts.append(made(_logits(keys, observed, queries, span, after)))
        logits = mx.concatenate(parts, axis=-1)
        sums.append(LogSum(*map(made, _log_sum(logits))))
        if keeps:
            kept.append(logits)
    total = _with_sinks(observed, _joined(sums))
    votes: list[mx.array] = []
    for i, (span, *_) in enumerate(groups):
        after = votes[-1:] or list(total)
        logits = kept[i] if keeps else _logits(keys, observed, queries, span, after)
        votes.append(made(summed(total.share(logits))))
    return mx.concatenate(votes, axis=-1)


class LogSum(NamedTuple):
    """Logarithms, base 2, of softmax denominators `(B, n_kv_heads, group * n)`, each a sum of two numbers.

    Logits of 10^5 leave float32 no digits for the second one, in which queries differ.
    """

    top: mx.array  # the largest logit
    rest: mx.array  # the logarithm of the sum of what all are of it

    def share(self, logits: mx.array) -> mx.array:
        """The logarithm of what logits `(B, n_kv_heads, group * n, T)` have of the softmax."""
        return (logits - self.top[..., None]) - self.rest[..., None]


def _log_sum(logits: mx.array) -> LogSum:
    """Of powers of two along the last axis."""
    top = logits.max(axis=-1)
    return LogSum(top, mx.log2(mx.power(2, logits - top[..., None]).sum(axis=-1)))


def _joined(sums: Sequence[LogSum]) -> LogSum:
    tops = mx.stack([part.top for part in sums])
    top = tops.max(axis=0)
    powers = mx.power(2, tops - top + mx.stack([part.rest for part in sums]))
    return LogSum(top, mx.log2(powers.sum(axis=0)))


def _with_sinks(observed: Queries, total: LogSum) -> LogSum:
    """The softmax's denominators, the sinks' part added."""
    if observed.sinks is None:
        return total
    _, H, n = total.top.shape
    sinks = (observed.sinks.astype(mx.float32) * LOG2_E).reshape(1, H, -1)
    sinks = mx.broadcast_to(mx.repeat(sinks, n // sinks.shape[2], axis=2), total.top.shape)
    return _joined([total, LogSum(sinks, mx.zeros_like(sinks))])


def _group(keys: Keys, observed: Queries) -> int:
    """Query heads of a KV head."""
    return observed.heads.shape[1] // keys.shape[1]


def _grouped(keys: Keys, observed: Queries) -> mx.array:
    """Queries `(B, n_kv_heads, group * n, head_dim)` float32, as `_logits` takes them."""
    B, H, _, D = keys.shape
    return observed.heads.astype(mx.float32).reshape(B, H, -1, D)


def _waits(keys: Keys) -> bool:
    return isinstance(keys, KeyBlocks) and keys.waits


def block_size(entry_bytes: int, n_bytes: int | None = None) -> int:
    """Return how many entries of `entry_bytes` to compute at a time: `n_bytes`, by default `BLOCK_BYTES`."""
    return max(64, (n_bytes or BLOCK_BYTES) // entry_bytes)


def _block(queries: mx.array, n_bytes: int | None = None) -> int:
    """Entries whose logits are held at a time; for few queries their float32 keys are what counts."""
    B, H, n, D = queries.shape
    return block_size(4 * B * H * max(n, D // 2), n_bytes)


def _spans(observed: Queries, T: int, block: int) -> Iterator[tuple[int, int]]:
    """Yield blocks `[start, stop)` of T; no block holds both entries that all queries see and others."""
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
    """Causally masked logits `(B, n_kv_heads, group * n, stop - start)`, computed after what is given."""
    start, stop = span
    if isinstance(keys, KeyBlocks):
        part = keys.read(start, stop, after)
    else:
        part = mx.depends(keys[:, :, start:stop], list(after))
    # Matrix units of GPUs may round float32 factors to TensorFloat-32, which has as many digits as float16: products of
    # half-precision queries and keys are exact then, and those of scaled queries would not be.
    logits = (queries @ part.astype(mx.float32).mT) * (observed.scale * LOG2_E)
    if observed.cap is not None:
        cap = observed.cap * LOG2_E
        logits = cap * mx.tanh(logits / cap)
    if stop <= observed.places.start + 1:
        return logits
    own = _own_places(observed, queries.shape[2] // len(observed.places))
    return mx.where(mx.arange(start, stop) <= own[:, None], logits, HIDDEN)


def _own_places(observed: Queries, group: int) -> mx.array:
    """The place of each of the queries `(B, n_kv_heads, group * n, head_dim)`: `(group * n,)`."""
    return mx.tile(mx.arange(observed.places.start, observed.places.stop), group)


def nan_scores() -> SnapKVError:
    """Return the error of scores that are NaN."""
    return SnapKVError("the entries' scores contain NaN, so the model's attention produced NaN")
