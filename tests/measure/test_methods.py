"""The methods that measurements compare."""

import pytest

from mlx_snapkv.errors import SnapKVError
from mlx_snapkv.measure.methods import Method, require_compression
from mlx_snapkv.planning.settings import setting_named


def method(text):
    return Method(setting_named(text))


def test_a_policy_must_compress_at_least_one_length():
    with pytest.raises(SnapKVError, match="the prompt's 512 tokens are below min_ctx"):
        require_compression([Method(), method("snapkv:min_ctx=600")], [256, 512])
    require_compression([method("keydiff:budget=300,min_ctx=400")], [256, 512])
