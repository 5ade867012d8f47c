"""The cache of a fixed budget, driven by hand."""

import mlx.core as mx
import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st

from mlx_snapkv import H2O, TOVA, BlockKVCache, KeyDiff, SnapKVError
from mlx_snapkv.entries.queries import Captured
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
        mask = cache.make_mask(L, return_array=True)
        keys, values = cache.update_and_fetch(*rows_of(fed, L))
        if mask is not None:  # every token sees all that is held up to its own
            own = np.arange(fed, fed + L)[:, None]
            assert np.array_equal(mask, np.asarray(cache.positions)[0, 0].astype(int) <= own)
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


def test_layers_of_different_sizes_refuse_one_mask_for_all():
    with pytest.raises(SnapKVError, match="must keep equally many entries"):
        make_cache(uniform=False).make_mask(3, return_array=True)
    with pytest.raises(SnapKVError, match="sliding-window"):
        make_cache().make_mask(3, window_size=8)


def test_buffers_are_allocated_once_and_a_larger_update_is_held_until_the_next():
    small, cache = make_cache(rows=8, block=4, expected=9), make_cache(rows=8, block=4)
    small.update_and_fetch(*rows_of(0, 3)), cache.update_and_fetch(*rows_of(0, 8))
    assert (small.keys.shape[2], cache.keys.shape[2]) == (9, 12)
    assert cache.update_and_fetch(*rows_of(8, 20))[0].shape[2] == 28
    assert cache.update_and_fetch(*rows_of(28, 1))[0].shape[2] == 9
    assert cache.keys.shape[2] == 12


def test_an_eviction_precedes_steady_tokens_and_none_comes_between_them():
    cache = make_cache(rows=8, block=4, steady=range(10, 16))
    cache.update_and_fetch(*rows_of(0, 10))
    sizes = [cache.update_and_fetch(*rows_of(t, 1))[0].shape[2] for t in range(10, 17)]
    assert sizes == [9, 10, 11, 12, 13, 14, 9]


def feed(cache, start, n, queries):
    """An attention call as the patched classes make it."""
    keys, values = rows_of(start, n)
    cache.update_and_fetch(keys, values)
    cache.record(Captured(queries[:, :, start : start + n], 0.5))
    return keys


def test_h2o_counts_the_attention_of_all_queries_however_they_come_and_evicts_it_with_its_entry():
    queries = mx.random.normal((B, 4, 20, D), key=mx.random.key(7))
    for cuts in ([20], [5, 15], [7, 1, 1, 1, 9, 1]):
        cache = make_cache(H2O(), rows=12, n_window=2, block=20)
        keys = [feed(cache, sum(cuts[:i]), n, queries) for i, n in enumerate(cuts)]
        received = reference.votes(queries, mx.concatenate(keys, axis=2), range(20), 0.5)
        assert np.allclose(cache.held().received, received, atol=1e-5)
        cache.evict()
        kept = np.asarray(cache.positions).astype(int)
        kept_received = np.take_along_axis(np.asarray(received).reshape(B, H, 20), kept, axis=-1)
        assert np.allclose(cache.held().received, kept_received, atol=1e-5)


@pytest.mark.parametrize("n_back", [0, 2])
def test_the_last_queries_vote_when_a_block_is_evicted_but_not_of_tokens_rolled_back(n_back):
    queries = mx.random.normal((B, 4, 16, D), key=mx.random.key(7))
    cache = make_cache(TOVA(), rows=6, n_window=1, block=6)
    keys = [feed(cache, 0, 6, queries), feed(cache, 6, 5, queries)[:, :, : 5 - n_back]]
    cache.trim(n_back)
    last = 11 - n_back
    keys = mx.concatenate([*keys, feed(cache, last, 1, -queries)], axis=2)
    votes = reference.votes(-queries[:, :, last : last + 1], keys, [last], 0.5).mean(axis=1)[0]
    cache.evict()
    assert cache.positions[0, 0].tolist() == reference.select(votes, 0, 5, 1)


def test_without_the_queries_it_asks_for_a_policy_says_so():
    cache = make_cache(TOVA(), rows=6, block=2)
    cache.update_and_fetch(*rows_of(0, 8))
    with pytest.raises(SnapKVError, match="were not recorded"):
        cache.update_and_fetch(*rows_of(8, 1))


def test_a_committed_eviction_is_rolled_back_when_its_mark_is_reopened():
    cache = make_cache(rows=8, block=4)
    cache.update_and_fetch(*rows_of(0, 11))
    held = cache.keys_and_values()[0]
    cache.mark()
    for position in (11, 12):  # the second evicts
        cache.update_and_fetch(*rows_of(position, 1))
    mark = cache.commit()
    assert mark.nbytes == 2 * B * H * 12 * D * 4
    cache.mark()
    cache.update_and_fetch(*rows_of(13, 1))
    assert cache.commit().nbytes == 0
    cache.reopen(mark)
    cache.rollback(3)
    assert cache.offset == 11 and mx.array_equal(cache.keys_and_values()[0], held)
