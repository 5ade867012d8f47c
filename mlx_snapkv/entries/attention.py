"""How much attention observed queries give to every row of a layer."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx

from .entries import Rows

BLOCK_BYTES = 16 << 20  # of float32 logits made at a time
HELD_BYTES = 48 << 20  # of logits and float32 keys, below which one pass over all rows will do
LOG2_E = 1.4426950408889634  # softmax by powers of two, which a CPU takes in half the time of exp


def attention_votes(rows: Rows) -> mx.array:
    """SnapKV's votes (section 3, "Voting"): `(B, n_kv_heads, T)` float32.

    Softmax over all rows up to the query's own position, summed over the observed queries, averaged over
    the query heads of a GQA group. Long prompts are scored in blocks of T, so that working memory does not
    grow with it.
    """
    queries, group = _grouped(rows)
    queries = queries * LOG2_E
    sinks = _sink_logits(rows, queries)
    B, H, T, D = rows.keys.shape
    held = 4 * B * H * T * (queries.shape[2] + (D if rows.keys.dtype != mx.float32 else 0))
    votes = _votes_held if held <= HELD_BYTES else _votes_in_blocks
    return votes(rows, queries, sinks) / group


def _votes_held(rows: Rows, queries: mx.array, sinks: mx.array) -> mx.array:
    logits = list(_logit_blocks(rows, queries, rows.keys.shape[2]))
    top = sinks
    for part in logits:
        top = mx.maximum(top, part.max(axis=-1))
    mx.eval(logits, top)
    weights = [mx.power(2, part - top[..., None]) for part in logits]
    total = mx.power(2, sinks - top)
    for part in weights:
        total = total + part.sum(axis=-1)
    share = (1 / total)[..., None, :]
    votes = mx.concatenate([share @ part for part in weights], axis=-1).squeeze(2)
    del logits, weights, part  # so that the evaluation can use their memory again
    mx.eval(votes)
    return votes


def _votes_in_blocks(rows: Rows, queries: mx.array, sinks: mx.array) -> mx.array:
    """The same in two passes: the softmax's denominators, then the votes."""
    block = _block(queries)
    top, total = sinks, mx.where(mx.isinf(sinks), 0.0, 1.0)
    for logits in _logit_blocks(rows, queries, block):
        higher = mx.maximum(top, logits.max(axis=-1))
        total = total * mx.power(2, top - higher) + mx.power(2, logits - higher[..., None]).sum(
            axis=-1
        )
        top = higher
        del logits
        mx.eval(top, total)
    share = (1 / total)[..., None, :]
    votes = []
    for logits in _logit_blocks(rows, queries, block):
        votes.append((share @ mx.power(2, logits - top[..., None])).squeeze(2))
        del logits
        mx.eval(votes[-1])
    return mx.concatenate(votes, axis=-1)


def _sink_logits(rows: Rows, queries: mx.array) -> mx.array:
    """The sinks' logits, base 2, for each grouped query, `(B, n_kv_heads, group * n)`; -inf without sinks."""
    B, H, n, _ = queries.shape
    if rows.sinks is None:
        return mx.full((B, H, n), -mx.inf)
    group = rows.sinks.size // H
    sinks = LOG2_E * rows.sinks.astype(mx.float32).reshape(1, H, group, 1)
    return mx.broadcast_to(sinks, (B, H, group, n // group)).reshape(B, H, n)


def shared_logits(rows: Rows) -> mx.array:
    """The pull request's score: `(B, n_kv_heads, T)` float32, the same for all heads.

    Queries averaged over each GQA group, then the highest logit over KV heads and queries.
    """
    B, H, T, _ = rows.keys.shape
    queries, group = _grouped(rows)
    n = queries.shape[2] // group
    mean = queries.reshape(B, H, group, n, -1).mean(axis=2)
    scores = []
    for logits in _logit_blocks(rows, mean, _block(mean)):
        scores.append(logits.max(axis=(1, 2)))
        mx.eval(scores[-1])
    return mx.broadcast_to(mx.concatenate(scores, axis=-1)[:, None], (B, H, T))


def _grouped(rows: Rows) -> tuple[mx.array, int]:
    """Scaled float32 queries `(B, n_kv_heads, group * n, head_dim)`, and the size of a GQA group."""
    observed, _ = rows.observed
    B, n_heads, n, D = observed.shape
    H = rows.keys.shape[1]
    queries = observed.astype(mx.float32) * rows.scale
    return queries.reshape(B, H, (n_heads // H) * n, D), n_heads // H


def _block(queries: mx.array) -> int:
    """Rows whose logits are held at a time."""
    B, H, n, _ = queries.shape
    return max(64, BLOCK_BYTES // (4 * B * H * n))


def _logit_blocks(rows: Rows, queries: mx.array, block: int) -> Iterator[mx.array]:
    """Causally masked logits `(B, n_kv_heads, n, block)` of `queries`, block by block over T."""
    n, T = queries.shape[2], rows.keys.shape[2]
    _, query_positions = rows.observed
    positions = mx.tile(query_positions, n // query_positions.size)[:, None]
    unmasked = min(T, int(query_positions[0].item()) + 1)  # type: ignore[arg-type]
    for begin, end in ((0, unmasked), (unmasked, T)):
        for start in range(begin, end, block):
            stop = min(start + block, end)
            logits = queries @ rows.keys[:, :, start:stop].astype(mx.float32).swapaxes(-1, -2)
            if begin:
                visible = mx.arange(start, stop)[None] <= positions
                logits = mx.where(visible, logits, -mx.inf)
            yield logits
