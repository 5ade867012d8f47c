"""Rows are quantised in the dtype that the model computes in."""

import mlx.core as mx
import pytest

from mlx_snapkv.entries.quantization import BITS, Quantization


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
def test_scales_biases_and_unpacked_rows_have_the_rows_dtype(dtype, bits):
    quantization = Quantization(bits, 32)
    rows = mx.random.normal((1, 2, 5, 64), key=mx.random.key(0)).astype(dtype)
    packed, scales, biases = quantization.pack(rows)
    assert (packed.dtype, scales.dtype, biases.dtype) == (mx.uint32, dtype, dtype)
    unpacked = quantization.unpack((packed, scales, biases))
    assert unpacked.dtype == dtype and unpacked.shape == rows.shape
    # A step of the coarsest group, and what half precision rounds away.
    assert (
        mx.abs(unpacked.astype(mx.float32) - rows.astype(mx.float32)).max()
        < 5 / (2**bits - 1) + 0.04
    )
