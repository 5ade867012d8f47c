"""Attention of a few queries, against plain NumPy in float64."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_snapkv.entries import few_queries


def _attention(q, k, v, scale):
    """Every query's softmax over the entries up to its own, one by one."""
    q, k, v = (np.array(x, np.float64) for x in (q, k, v))
    B, n_heads, L, _ = q.shape
    H, T = k.shape[1:3]
    out = np.zeros((B, n_heads, L, v.shape[-1]))
    for b, h, i in np.ndindex(B, n_heads, L):
        group = h // (n_heads // H)
        seen = T - L + i + 1
        scores = k[b, group, :seen] @ q[b, h, i] * scale
        weights = np.exp(scores - scores.max())
        out[b, h, i] = weights @ v[b, group, :seen] / weights.sum()
    return out


@pytest.mark.parametrize("n", [1, 2, 5, 17])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)])
def test_it_is_causal_attention(n, heads):
    n_heads, H = heads
    q = 4 * mx.random.normal((2, n_heads, n, 16), key=mx.random.key(n))
    held = mx.random.normal((2, H, 80, 24), key=mx.random.key(n + 1))
    # As a cache gives them: parts of longer arrays.
    k, v = held[:, :, :50, :16], held[:, :, 10:60, 12:]
    found = few_queries.attend(q, k, v, 0.3)
    np.testing.assert_allclose(np.array(found), _attention(q, k, v, 0.3), rtol=2e-5, atol=2e-6)


def test_large_scores_do_not_overflow():
    q = mx.full((1, 2, 3, 8), 40.0)
    k, v = mx.full((1, 1, 9, 8), 40.0), mx.random.normal((1, 1, 9, 8))
    found = few_queries.attend(q, k, v, 1.0)
    np.testing.assert_allclose(np.array(found), _attention(q, k, v, 1.0), rtol=1e-5, atol=1e-6)


def test_only_what_it_computes_is_taken():
    q, k = mx.zeros((1, 2, 3, 8)), mx.zeros((1, 1, 9, 8))
    one = q[:, :, :1]
    assert not few_queries.can_attend(q, k, "causal")
    with few_queries.in_use():
        on_a_cpu = mx.default_device().type == mx.cpu
        assert few_queries.can_attend(q, k, "causal") == on_a_cpu
        assert few_queries.can_attend(one, k, None) == on_a_cpu
        assert not few_queries.can_attend(q, k, None)
        assert not few_queries.can_attend(q, k, mx.ones((3, 9), mx.bool_))
        assert not few_queries.can_attend(q, (k, k, k), "causal")
        assert not few_queries.can_attend(q, k.astype(mx.float16), "causal")
        assert not few_queries.can_attend(q, k[:, :, :3], "causal")
    assert not few_queries.can_attend(q, k, "causal")
