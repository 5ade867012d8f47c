"""Numbers in the order of float32, which a ranking over ranks finds bit by bit."""

import mlx.core as mx
import numpy as np

from mlx_snapkv.several.ranking import _number, _ordered, largest
from mlx_snapkv.several.ranks import ALONE


def test_the_order_of_bits_is_that_of_numbers():
    numbers = np.array(
        [-np.inf, -3e38, -1.5, -1e-30, 0.0, 1e-30, 1.0, 1.5, 3e38, np.inf], np.float32
    )
    order = _ordered(mx.array(numbers)).tolist()
    assert order == sorted(set(order))
    assert [_number(n).item() for n in order] == numbers.tolist()
    assert _ordered(mx.array([-0.0])).item() == _ordered(mx.array([0.0])).item()


def test_alone_it_is_the_kth_largest():
    assert largest(mx.array([3.0, -1.0, 7.0, 7.0]), 3, ALONE).item() == 3.0
