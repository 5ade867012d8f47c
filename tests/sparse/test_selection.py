import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_snapkv.sparse.selection import n_of_groups, top_of_groups


@given(
    st.integers(2, 9000),
    st.integers(0, 40),
    st.floats(0, 1),
    st.sampled_from([np.nan, -np.inf, np.inf]),
    st.randoms(use_true_random=False),
)
@settings(deadline=None, max_examples=60)
def test_the_top_of_groups_are_places_of_scores_whatever_these_are(n, first, share, odd, random):
    """A place behind them would be read, or written to, though there is nothing."""
    first = min(first, n - 1)
    m = random.randint(1, n - first)
    k = random.randint(1, m + 2)
    rng = np.random.default_rng(random.randint(0, 1 << 30))
    scores = -rng.exponential(size=(1, 2, m)).astype(np.float32)
    scores[rng.random(scores.shape) < share] = odd
    places = np.array(top_of_groups(mx.array(scores), k, first, n))
    assert places.shape == (1, 2, n_of_groups(m, k, n))
    assert first <= places.min() and places.max() < first + m
    assert all(np.unique(own).size == own.size for own in places[0])
    if odd != np.inf and (np.isfinite(scores).sum(axis=-1) > places.shape[-1] + n / 8).all():
        assert np.isfinite(np.take_along_axis(scores, places.astype(np.int64) - first, -1)).all()
