import mlx.core as mx
import numpy as np
import numpy_attention
import pytest


def random(*shape):
    return mx.random.normal(shape, key=mx.random.key(sum(shape)))


@pytest.mark.parametrize("mask", [None, "causal", "bool", "added"])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_attention_equals_mlxs(mask, n_kv_heads):
    q, k, v = random(2, 4, 30, 8), random(2, n_kv_heads, 150, 8), random(2, n_kv_heads, 150, 16)
    if mask == "bool":
        mask = random(30, 150) > 0
    elif mask == "added":
        mask = random(2, 1, 30, 150)
    found = numpy_attention.attention(q, k, v, scale=0.3, mask=mask)
    wanted = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask)
    assert np.allclose(found, wanted, atol=1e-5)
