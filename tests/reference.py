"""Independent float64 NumPy references, written from the papers' formulas without sharing code with the package."""

import numpy as np


def softmax(logits, sinks=None):
    """Return the softmax over the last axis of logits `(..., n_heads, n, T)`. Sinks `(n_heads,)` take a share of it."""
    top = logits.max(axis=-1, keepdims=True)
    raw = np.exp(logits - top)
    sunk = 0 if sinks is None else np.exp(np.asarray(sinks, np.float64)[:, None, None] - top)
    return raw / (raw.sum(axis=-1, keepdims=True) + sunk)


def weights(queries, keys, query_positions, scale, sinks=None):
    """Return each query's softmax over the positions that it sees, `(B, n_heads, n, T)`."""
    queries, keys = np.asarray(queries, np.float64), np.asarray(keys, np.float64)
    group, T = queries.shape[1] // keys.shape[1], keys.shape[2]
    logits = np.einsum("bhid,bhtd->bhit", queries, keys.repeat(group, axis=1)) * scale
    logits = np.where(np.arange(T) <= np.array(query_positions)[:, None], logits, -np.inf)
    return softmax(logits, sinks)


def of_groups(by_head, n_kv_heads):
    """Return weights summed over queries and averaged over the heads of a group, `(B, n_kv_heads, T)`."""
    B, _, n, T = by_head.shape
    return by_head.reshape(B, n_kv_heads, -1, n, T).sum(axis=3).mean(axis=2)


def votes(queries, keys, query_positions, scale, sinks=None):
    """Return softmax votes `(B, n_kv_heads, T)`, summed over queries and averaged over the heads of a group."""
    return of_groups(weights(queries, keys, query_positions, scale, sinks), keys.shape[1])


def above_average(queries, keys, query_positions, scale):
    """Count the queries that give 1/t or more, averaged over a group: ScissorHands' scores, `(B, n_kv_heads, T)`."""
    seen = np.minimum(np.array(query_positions) + 1, keys.shape[2])[:, None]
    above = weights(queries, keys, query_positions, scale) >= 1 / seen
    return of_groups(above.astype(np.float64), keys.shape[1])


def forward_scores(queries, keys, query_positions, scale, n_ahead, ends, kernel):
    """Return SnapKV's scores with pool="forward", `(B, n_kv_heads, T)`, computed entry by entry.

    The last `n_ahead` queries belong to answer tokens. `ends` has the numbers of sink and window entries, which aren't
    pooled.
    """
    n, (n_sink, n_window) = queries.shape[2], ends

    def mean(first, stop):
        part = queries[:, :, first:stop], keys, query_positions[first:stop]
        return votes(*part, scale) / (stop - first)

    starts = [n - n_ahead - latest for latest in (32, 64) if n - n_ahead - latest > 0]
    out = mean(0, n)
    to_pool = [out.copy()]
    if starts:
        out = (out + mean(starts[0], n)) / 2
        to_pool = [np.maximum(mean(start, n) - mean(0, start), 0) for start in starts]
    for t in range(n_sink, out.shape[2] - n_window):
        for one in to_pool:
            before = [one[..., i] for i in range(max(n_sink, t - kernel + 1), t + 1)]
            out[..., t] = np.maximum(out[..., t], sum(before) / kernel)
    return out


def pool(row, kind, kernel):
    """Return the average (zero-padded, full divisor) or maximum over each position's neighbourhood.

    "forward" averages a position and the positions before it.
    """
    half = kernel // 2
    first, last = (kernel - 1, 0) if kind == "forward" else (half, half)
    out = np.zeros(len(row))
    for t in range(len(row)):
        near = [row[j] for j in range(t - first, t + last + 1) if 0 <= j < len(row)]
        out[t] = max(near) if kind == "max" else sum(near) / kernel
    return out


def select(scores, n_sink, top_k, n_window):
    """Return the kept positions by plain sorting: highest scores first, and lower positions first on ties."""
    T = len(scores)
    if n_sink + top_k + n_window >= T:
        return list(range(T))
    middle = sorted(range(n_sink, T - n_window), key=lambda t: (-scores[t], t))[:top_k]
    return sorted([*range(n_sink), *middle, *range(T - n_window, T)])


def attention(queries, keys, values, visible, scale):
    """Return dense attention `(n_heads, L, D)` under a boolean mask `visible` `(L, R)`."""
    group = queries.shape[0] // keys.shape[0]
    out = np.zeros((*queries.shape[:2], values.shape[-1]))
    for head in range(queries.shape[0]):
        logits = queries[head] @ keys[head // group].T * scale
        out[head] = softmax(np.where(visible, logits, -np.inf)) @ values[head // group]
    return out


def rotated(x, angles, neighbours=False):
    """Return `x` `(..., n, D)` with its first pairs of channels rotated by angles `(n, pairs)`.

    A pair is either (i, i + pairs) or two neighbouring channels.
    """
    n, x = angles.shape[1], x.astype(np.float64)
    first, second = (slice(n), slice(n, 2 * n))
    if neighbours:
        first, second = (slice(0, 2 * n, 2), slice(1, 2 * n, 2))
    a, b = x[..., first].copy(), x[..., second].copy()
    x[..., first] = a * np.cos(angles) - b * np.sin(angles)
    x[..., second] = a * np.sin(angles) + b * np.cos(angles)
    return x


def keydiff(keys, anchor, similarity):
    """Return KeyDiff's scores for one head's keys `(T, D)`: the negated similarity to the anchor, key by key."""
    keys = np.asarray(keys, np.float64)

    def alike(a, b):
        if similarity == "dot":
            return float(a @ b)
        if similarity == "euclidean":
            return -float(np.sqrt(((a - b) ** 2).sum()))
        return float(a @ b / (np.sqrt(a @ a) * np.sqrt(b @ b)))

    if anchor == "pairwise":
        return np.array([-np.mean([alike(k, other) for other in keys]) for k in keys])
    basis = keys
    if similarity == "cosine":
        basis = np.array([k / np.sqrt(k @ k) for k in keys])
    center = basis.mean(axis=0) if anchor == "mean" else np.median(basis, axis=0)
    return np.array([-alike(k, center) for k in keys])


def lagkv(keys, values, n_sink, lag):
    """Return LagKV's softmax scores for one head, `(blocks - 1, lag)`, computed entry by entry."""
    n_blocks = (len(keys) - n_sink) // lag
    out = np.zeros((n_blocks - 1, lag))
    for states in (np.asarray(keys, np.float64), np.asarray(values, np.float64)):
        for block in range(n_blocks - 1):
            start = n_sink + block * lag
            after = states[start + lag : start + 2 * lag]
            least, most = after.min(axis=0), after.max(axis=0)
            spread = np.zeros(lag)
            for i in range(lag):
                scaled = (states[start + i] - least) / (most - least)
                spread[i] = np.sqrt(((scaled - scaled.mean()) ** 2).sum() / (len(scaled) - 1))
            out[block] += softmax(spread) / 2
    return out


def expected_attention(keys, values, queries, rotations, n_sink, scale):
    """Return Expected Attention's scores for one KV head's entries after the sink, `(T - n_sink,)`, key by key.

    `keys` and `values` are `(T, D)`, and `queries` are `(group, T, D)` before RoPE. `rotations` `(n, D, D)` are the
    next positions' matrices.
    """
    keys, values, queries = (np.asarray(x, np.float64) for x in (keys, values, queries))
    turn = np.asarray(rotations, np.float64).mean(axis=0)
    total = np.zeros(len(keys) - n_sink)
    for head in queries[:, n_sink:]:
        mean = turn @ (sum(head) / len(head))
        away = [turn @ q - mean for q in head]
        covariance = sum(np.outer(a, a) for a in away) / len(head)
        logits = [scale * k @ mean + scale**2 * (k @ covariance @ k) / 2 for k in keys[n_sink:]]
        total += softmax(np.array(logits)) / len(queries)
    return total * np.sqrt((values[n_sink:] ** 2).sum(axis=1))
