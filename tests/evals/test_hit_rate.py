import math

import mlx.core as mx
import pytest

from mlx_snapkv import SnapKVError
from mlx_snapkv.evals.hit_rate import hit_rate

ATTENTION = mx.array([[0.5, 0.3, 0.15, 0.05], [0.01, 0.01, 0.08, 0.9]])


def test_by_hand():
    # Significant above 0.1: head 0 has positions 0, 1 and 2, head 1 has 3. Voted: {0, 3} and {3, 2}: two hits of four.
    assert hit_rate(ATTENTION, mx.array([[0, 3], [3, 2]]), theta=0.1) == pytest.approx(2 / 4)


def test_the_threshold_is_strict():
    # At the paper's 0.05, position 3 of head 0 does not exceed it: 3 + 2 significant.
    assert hit_rate(ATTENTION, mx.array([[0, 1], [2, 3]])) == pytest.approx(4 / 5)


def test_everything_and_nothing():
    everything = mx.broadcast_to(mx.arange(4), (2, 4))
    assert hit_rate(ATTENTION, everything) == 1.0
    assert math.isnan(hit_rate(ATTENTION, everything, theta=0.95))


def test_shapes_must_agree():
    with pytest.raises(SnapKVError, match="must agree"):
        hit_rate(ATTENTION, mx.array([[0, 1]]))
