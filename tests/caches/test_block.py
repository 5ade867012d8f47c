"""The cache of a fixed budget, driven by hand."""

import mlx.core as mx
import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from mlx_snapkv import H2O, TOVA, BlockKVCache, KeyDiff, SnapKVError
from mlx_snapkv.policies.budgets import Quota

B, H, D = 1, 2, 4


def rows_of(start, n, seed=0):
    """Random keys, and values that tell their position."""
    keys = mx.random.normal((B, H, n, D), key=mx.random.key(seed + start))
    values = mx.broadcast_to(mx.arange(start, start + n)[:, None] * 1.0, (B, H, n, D))
    return keys, mx.contiguous(values)


def make_cache(policy=None, rows=12, n_sink=0, n_window=2, block=6, **keywords):
    return BlockKVCache(policy or KeyDiff(), Quota(rows, n_sink, n_window), block, **keywords)


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=30),
    st.integers(1, 20),
    st.integers(0, 3),
    st.sampled_from([0, 5, 40]),
)
def test_rows_never_exceed_the_budget_and_a_block(updates, rows, n_window, expected):
    n_window = min(n_window, rows)
    cache = make_cache(rows=rows, n_window=n_window, expected=expected)
    fed = 0
    for L in updates:
        keys, values = cache.update_and_fetch(*rows_of(fed, L))
        fed += L
        assert keys.shape[2] == values.shape[2] == cache.size() <= rows + 6
        assert cache.keys.shape[2] <= rows + 6 and cache.values.shape[2] <= rows + 6
        positions = np.asarray(cache.positions)
        assert cache.offset == fed and positions.shape == (B, H, cache.size())
        # Each entry is the one it is said to be.
        assert np.array_equal(np.asarray(values)[..., 0], positions)
        assert (np.diff(positions.astype(int)) > 0).all()
        newest = min(fed, max(L, n_window))
        assert (positions[..., -newest:] == np.arange(fed - newest, fed)).all()


def test_an_eviction_keeps_what_the_policy_scores_highest():
    cache = make_cache(rows=8, n_window=2, n_sink=1, block=12)
    keys, values = rows_of(0, 20)
    cache.update_and_fetch(keys, values)
    cache.evict()
    for head in range(H):
        scores = reference.keydiff(keys[0, head], "mean", "cosine")
        assert cache.positions[0, head].tolist() == reference.select(scores, 1, 5, 2)
    kept = cache.positions[..., None].astype(mx.int32)
    assert mx.array_equal(cache.keys_and_values()[0], mx.take_along_axis(keys, kept, axis=2))


@pytest.mark.parametrize("return_array", [False, True])
def test_a_blocks_attention_is_the_dense_one_with_dropped_positions_masked_out(return_array):
    cache = make_cache(rows=10, block=6)
    all_keys, all_values = rows_of(0, 0)
    for start in range(0, 36, 6):
        keys, values = rows_of(start, 6)
        values = mx.random.normal(values.shape, key=mx.random.key(start))
        all_keys = mx.concatenate([all_keys, keys], axis=2)
        all_values = mx.concatenate([all_values, values], axis=2)
        queries = mx.random.normal((B, 4, 6, D), key=mx.random.key(100 + start))
        mask = cache.make_mask(6, return_array=return_array)
        seen_keys, seen_values = cache.update_and_fetch(keys, values)
        out = mx.fast.scaled_dot_product_attention(
            queries, seen_keys, seen_values, scale=0.5, mask=mask
        )
        places = np.arange(start + 6)
        for head in range(4):
            held = np.isin(places, np.asarray(cache.positions[0, head // 2]).astype(int))
            visible = held & (places <= places[start:, None])
            heads = (queries, head), (all_keys, head // 2), (all_values, head // 2)
            alone = (np.asarray(x[0, h : h + 1], np.float64) for x, h in heads)
            expected = reference.attention(*alone, visible, 0.5)
            assert np.allclose(out[0, head], expected[0], atol=1e-5)


def test_layers_of_different_sizes_refuse_one_mask_for_all():
    with pytest.raises(SnapKVError, match="must keep equally many entries"):
        make_cache(uniform=False).make_mask(3, return_array=True)
    with pytest.raises(SnapKVError, match="sliding-window"):
        make_cache().make_mask(3, window_size=8)


def test_buffers_are_allocated_once():
    cache = make_cache(rows=8, block=4)
    cache.update_and_fetch(*rows_of(0, 3))
    assert cache.keys.shape[2] == 12
    small = make_cache(rows=8, block=4, expected=9)
    small.update_and_fetch(*rows_of(0, 3))
    assert small.keys.shape[2] == 9


def test_an_eviction_precedes_steady_tokens_and_none_comes_between_them():
    cache = make_cache(rows=8, block=4, steady=range(10, 16))
    cache.update_and_fetch(*rows_of(0, 10))
    sizes = [cache.update_and_fetch(*rows_of(t, 1))[0].shape[2] for t in range(10, 17)]
    assert sizes == [9, 10, 11, 12, 13, 14, 9]


def test_an_update_larger_than_a_block_is_held_until_the_next():
    cache = make_cache(rows=8, block=4)
    cache.update_and_fetch(*rows_of(0, 8))
    assert cache.update_and_fetch(*rows_of(8, 20))[0].shape[2] == 28
    assert cache.update_and_fetch(*rows_of(28, 1))[0].shape[2] == 9
    assert cache.keys.shape[2] == 12


def feed(cache, start, n, queries):
    """An attention call as the patched classes make it."""
    keys, values = rows_of(start, n)
    cache.update_and_fetch(keys, values)
    cache.record(queries[:, :, start : start + n], 0.5)
    return keys


def test_h2o_counts_the_attention_of_all_queries_however_they_come():
    queries = mx.random.normal((B, 4, 20, D), key=mx.random.key(7))
    keys = rows_of(0, 20)[0]
    raw = reference.votes(queries, keys, range(20), 0.5)
    for cuts in ([20], [5, 15], [7, 1, 1, 1, 9, 1]):
        cache = make_cache(H2O(), rows=20, block=20)
        start = 0
        for n in cuts:
            cache.update_and_fetch(keys[:, :, start : start + n], keys[:, :, start : start + n])
            cache.record(queries[:, :, start : start + n], 0.5)
            start += n
        assert np.allclose(cache.held().received, raw, atol=1e-5)


def test_h2o_a_dropped_row_takes_its_votes_along():
    queries = mx.random.normal((B, 4, 16, D), key=mx.random.key(7))
    cache = make_cache(H2O(), rows=6, n_window=2, block=6)
    feed(cache, 0, 6, queries)
    feed(cache, 6, 6, queries)
    before, positions = cache.held().received, cache.positions
    cache.evict()
    for head in range(H):
        kept = [positions[0, head].tolist().index(p) for p in cache.positions[0, head].tolist()]
        assert cache.held().received[0, head].tolist() == before[0, head][mx.array(kept)].tolist()


def test_the_last_queries_vote_when_a_block_is_evicted():
    queries = mx.random.normal((B, 4, 16, D), key=mx.random.key(7))
    cache = make_cache(TOVA(), rows=6, n_window=1, block=6)
    keys = mx.concatenate(
        [feed(cache, 0, 6, queries), feed(cache, 6, 5, queries), feed(cache, 11, 1, queries)],
        axis=2,
    )
    votes = reference.votes(queries[:, :, 11:12], keys, [11], 0.5).mean(axis=1)[0]
    cache.evict()
    assert cache.positions[0, 0].tolist() == reference.select(votes, 0, 5, 1)


def test_queries_of_tokens_taken_back_do_not_vote():
    queries = mx.random.normal((B, 4, 16, D), key=mx.random.key(7))
    cache = make_cache(TOVA(), rows=6, n_window=1, block=6)
    feed(cache, 0, 6, queries)
    feed(cache, 6, 3, queries)
    cache.trim(2)
    other = -queries
    feed(cache, 7, 1, other)
    assert list(cache.query_positions) == [7]
    assert mx.array_equal(cache.queries, other[:, :, 7:8])


def test_without_the_queries_it_asks_for_a_policy_says_so():
    cache = make_cache(TOVA(), rows=6, block=2)
    cache.update_and_fetch(*rows_of(0, 8))
    with pytest.raises(SnapKVError, match="were not recorded"):
        cache.update_and_fetch(*rows_of(8, 1))


def test_a_committed_mark_is_reopened_and_knows_its_bytes():
    cache = make_cache(rows=8, block=4)
    cache.update_and_fetch(*rows_of(0, 12))
    before = cache.positions.tolist()
    cache.mark()
    cache.update_and_fetch(*rows_of(12, 1))  # evicts
    mark = cache.commit()
    assert mark.nbytes == 2 * B * H * 12 * D * 4
    cache.mark()
    cache.update_and_fetch(*rows_of(13, 1))
    assert cache.commit().nbytes == 0
    cache.reopen(mark)
    cache.rollback(2)
    assert cache.offset == 12 and cache.positions.tolist() == before
