"""Attention block by block is MLX's own attention function's."""

import mlx.core as mx
import pytest

from mlx_snapkv.entries import blockwise, device
from mlx_snapkv.entries.blockwise import blockwise_attention, suits


@pytest.mark.parametrize("n", [3, 64, 67, 200])
@pytest.mark.parametrize("spread", [1, 30])
def test_it_is_causal_attention(n, spread, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK", 32)
    keys, values = (mx.random.normal((2, 2, n, 8), key=mx.random.key(i)) for i in (0, 1))
    queries = spread * mx.random.normal((2, 6, 3, 8), key=mx.random.key(2))
    wanted = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask="causal")
    found = blockwise_attention(queries, keys, values, 0.3)
    assert mx.allclose(found, wanted, atol=1e-4)


def test_what_it_does_not_compute(monkeypatch):
    """A single token's attention stays bit-identical, and half precision rounds as it does for single tokens."""
    monkeypatch.setattr(device, "used", device.CPU)
    two, keys = mx.zeros((1, 4, 2, 8)), mx.zeros((1, 2, 9, 8))
    half = mx.float16
    assert suits(two, keys, "causal", None)
    assert not suits(two[:, :, :1], keys, None, None)
    assert not suits(two, (keys, keys, keys), "causal", None)
    assert not suits(two, keys, mx.ones((2, 9), mx.bool_), None)
    assert not suits(two, keys, "causal", mx.zeros(4))
    assert not suits(two.astype(half), keys.astype(half), "causal", None)
    monkeypatch.setattr(device, "used", device.GPU)  # which has kernels of its own
    assert not suits(two, keys, "causal", None)
