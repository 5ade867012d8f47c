"""The kernels on a GPU, Metal or CUDA, against float64 and the plain path."""

import mlx.core as mx
import pytest
from kernel_cases import TOKENS, TOLERANCES, VARIANTS, Token

from mlx_snapkv.sparse.kernels.self_test import DTYPES, HEAD_SIZES, describe_difference

if not (mx.metal.is_available() or mx.cuda.is_available()):
    pytest.skip("there is no GPU", allow_module_level=True)


# The GPUs of hosted Macs have no bfloat16: `-k "not bfloat16"`.
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 4, 8, 16])
@pytest.mark.parametrize("head_dim", HEAD_SIZES)
def test_kernels_equal_the_plain_path(head_dim, group, dtype):
    assert describe_difference(head_dim, group, dtype) is None


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("case", TOKENS)
def test_attention_equals_float64(variant, case):
    assert Token(variant, **TOKENS[case]).difference() < TOLERANCES[variant[2]]


def test_a_transposed_query_is_read_in_order():
    token = Token(VARIANTS[1])
    expected = token.attention()
    token.queries = mx.contiguous(token.queries.swapaxes(1, 2)).swapaxes(1, 2)
    assert mx.array_equal(expected, token.attention())


def test_a_view_of_a_buffer_is_read_correctly():
    token = Token(VARIANTS[1])
    expected = token.attention()
    token.prompt = [x[:, :, :910] for x in token.prompt]
    assert mx.array_equal(expected, token.attention())
