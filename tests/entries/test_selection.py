import mlx.core as mx
import numpy as np
import reference
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_snapkv.compress.selection import select_positions
from mlx_snapkv.sparse.selection import n_of_groups, top_of_groups


def positions(scores, **parts):
    return select_positions(mx.array(scores)[None, None], **parts)[0, 0].tolist()


def test_every_kv_head_and_batch_row_ranks_on_its_own():
    scores = mx.array([[[0.0, 3, 1, 2, 0], [0, 1, 2, 3, 0]], [[0, 2, 3, 1, 0], [0, 0, 0, 1, 0]]])
    kept = select_positions(scores, n_sink=1, top_k=1, n_window=1)
    assert kept[..., 1].tolist() == [[1, 3], [2, 3]] and kept.dtype == mx.uint32


def test_nan_is_the_lowest_score():
    nan = float("nan")
    assert positions([0.0, nan, 1, nan, 2, 0], n_sink=1, top_k=2, n_window=1) == [0, 2, 4, 5]
    assert positions([0.0, nan, 1, nan, nan, 0], n_sink=1, top_k=2, n_window=1) == [0, 1, 2, 5]


@given(
    scores=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    n_sink=st.integers(0, 10),
    top_k=st.integers(0, 20),
    n_window=st.integers(0, 10),
)
def test_equals_a_plain_sort(scores, n_sink, top_k, n_window):
    kept = positions([float(s) for s in scores], n_sink=n_sink, top_k=top_k, n_window=n_window)
    assert kept == reference.select(scores, n_sink, top_k, n_window)
    assert len(kept) == min(len(scores), n_sink + top_k + n_window)


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
