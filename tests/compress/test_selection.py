import mlx.core as mx
import reference
from hypothesis import given
from hypothesis import strategies as st

from mlx_snapkv.compress.selection import select
from mlx_snapkv.entries.quota import Quota


def positions(scores, n_sink, top_k, n_window):
    quota = Quota(n_sink + top_k + n_window, n_sink, n_window)
    return select(mx.array(scores)[None, None], quota)[0, 0].tolist()


def test_every_kv_head_and_batch_row_ranks_on_its_own():
    scores = mx.array([[[0.0, 3, 1, 2, 0], [0, 1, 2, 3, 0]], [[0, 2, 3, 1, 0], [0, 0, 0, 1, 0]]])
    kept = select(scores, Quota(3, n_sink=1, n_window=1))
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
def test_selection_equals_a_plain_sort(scores, n_sink, top_k, n_window):
    kept = positions([float(s) for s in scores], n_sink, top_k, n_window)
    assert kept == reference.select(scores, n_sink, top_k, n_window)
    assert len(kept) == min(len(scores), n_sink + top_k + n_window)
