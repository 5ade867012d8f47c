"""Chosen positions equal the best positions of a stable NumPy sort."""

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_snapkv.sparse.selection import best_positions


def stable_best(scores: np.ndarray, k: int) -> set[int]:
    """Return the `k` best positions in a row of scores. NaN and infinities sort last. Ties go to lower positions."""
    costs = np.where(np.isfinite(scores), -scores.astype(np.float64), np.inf)
    return {*np.argsort(costs, kind="stable")[:k].tolist()}


@given(
    st.integers(1, 9000),
    st.integers(0, 40),
    st.floats(0, 1),
    st.sampled_from([np.nan, -np.inf, -1.0, 0.0, -0.0]),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=60)
def test_the_best_places_equal_a_stable_sorts(m, first, share, odd, random):
    k = random.randint(1, m + 2)
    rng = np.random.default_rng(random.randint(0, 1 << 30))
    scores = -rng.exponential(size=(1, 2, m)).astype(np.float32)
    scores[rng.random(scores.shape) < share] = odd
    positions = np.array(best_positions(mx.array(scores), k, first))
    assert positions.dtype == np.uint32 and positions.shape == (1, 2, min(k, m))
    for row, found in zip(scores[0], positions[0]):
        assert {*(found - first).tolist()} == stable_best(row, k)


def test_ties_go_to_lower_places():
    scores = mx.full((1, 1, 5000), -1.0)
    assert sorted(best_positions(scores, 700, 3)[0, 0].tolist()) == [*range(3, 703)]
