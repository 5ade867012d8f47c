"""Independent references in float64 NumPy, written from the papers' formulas and sharing no code with the package."""

from __future__ import annotations

import numpy as np


def votes(queries, keys, query_positions, scale):
    """Softmax votes `(B, n_kv_heads, T)`, one query at a time: masked softmax, sum over queries, mean over a group."""
    queries, keys = np.asarray(queries, np.float64), np.asarray(keys, np.float64)
    B, n_heads, n, _ = queries.shape
    H, T = keys.shape[1:3]
    group = n_heads // H
    out = np.zeros((B, H, T))
    for b in range(B):
        for head in range(n_heads):
            for i in range(n):
                seen = int(query_positions[i]) + 1
                logits = keys[b, head // group, :seen] @ queries[b, head, i] * scale
                weights = np.exp(logits - logits.max())
                out[b, head // group, :seen] += weights / weights.sum() / group
    return out


def pool(row, kind, kernel):
    """Average (zero-padded, full divisor) or maximum of each position's neighbourhood."""
    half = kernel // 2
    out = np.zeros(len(row))
    for t in range(len(row)):
        near = [row[j] for j in range(t - half, t + half + 1) if 0 <= j < len(row)]
        out[t] = max(near) if kind == "max" else sum(near) / kernel
    return out


def select(scores, n_sink, top_k, n_window):
    """Positions by a plain sort: highest score first, the lower position on ties."""
    T = len(scores)
    if n_sink + top_k + n_window >= T:
        return list(range(T))
    middle = sorted(range(n_sink, T - n_window), key=lambda t: (-scores[t], t))[:top_k]
    return sorted([*range(n_sink), *middle, *range(T - n_window, T)])


def attention(queries, keys, values, visible, scale):
    """Dense attention `(n_heads, L, D)` with a boolean `visible` `(L, R)`."""
    group = queries.shape[0] // keys.shape[0]
    out = np.zeros((*queries.shape[:2], values.shape[-1]))
    for head in range(queries.shape[0]):
        logits = queries[head] @ keys[head // group].T * scale
        logits = np.where(visible, logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out[head] = weights / weights.sum(-1, keepdims=True) @ values[head // group]
    return out


def keydiff(keys, anchor, similarity):
    """KeyDiff's scores of one head's keys `(T, D)`: minus the similarity to the anchor, one key at a time."""
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


def smallest_mass(scores, received, n_sink, n_window, mass):
    """The fewest rows per head, all heads alike, that hold `mass` of a layer's votes `(H, T)`; tries all."""
    T = scores.shape[-1]
    for top_k in range(T - n_sink - n_window + 1):
        kept = sum(
            received[h, select(scores[h], n_sink, top_k, n_window)].sum()
            for h in range(len(scores))
        )
        if kept / received.sum() >= mass:
            return n_sink + top_k + n_window
    return T
