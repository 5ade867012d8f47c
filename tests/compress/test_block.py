import numpy as np
import reference
from cache_kinds import SCALE, B, H, feed, rows
from hypothesis import given
from hypothesis import strategies as st

from mlx_snapkv import H2O, TOVA, BlockKVCache, KeyDiff
from mlx_snapkv.entries.quota import Quota


def update(cache, n):
    """Feed `n` tokens without recording queries. Return the keys and values that the attention reads."""
    return cache.update_and_fetch(*rows(cache.offset, n)[:2])


def make_cache(policy=None, budget=12, n_sink=0, n_window=2, block=6, **keywords):
    return BlockKVCache(policy or KeyDiff(), Quota(budget, n_sink, n_window), block, **keywords)


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=30),
    st.integers(1, 20),
    st.integers(0, 3),
    st.sampled_from([0, 5, 40]),
)
def test_entries_never_exceed_the_budget_and_a_block(updates, budget, n_window, expected):
    n_window = min(n_window, budget)
    cache = make_cache(budget=budget, n_window=n_window)
    cache.expected_size = expected
    fed = 0
    for L in updates:
        mask = cache.make_mask(L, return_array=True)
        keys, values = update(cache, L)
        if mask is not None:  # every token sees all held entries up to its own
            own = np.arange(fed, fed + L)[:, None]
            assert np.array_equal(mask, np.asarray(cache.positions)[0, 0].astype(int) <= own)
        fed += L
        assert keys.shape[2] == values.shape[2] == cache.size() <= budget + 6
        assert max(cache.keys.shape[2], cache.values.shape[2]) <= budget + 6
        positions = np.asarray(cache.positions)
        assert cache.offset == fed and positions.shape == (B, H, cache.size())
        for held, every in zip((keys, values), rows(0, fed)):
            wanted = np.take_along_axis(np.asarray(every), positions[..., None].astype(int), axis=2)
            assert np.array_equal(held, wanted)
        assert (np.diff(positions.astype(int)) > 0).all()
        newest = min(fed, max(L, n_window))
        assert (positions[..., -newest:] == np.arange(fed - newest, fed)).all()


def test_an_update_larger_than_a_block_is_held_until_the_next_update():
    cache = make_cache(budget=8, block=4)
    update(cache, 8)
    assert [update(cache, n)[0].shape[2] for n in (20, 1)] == [28, 9]
    assert cache.keys.shape[2] == 12


def test_evictions_come_before_and_after_steady_tokens_but_not_between_them():
    cache = make_cache(budget=8, block=4)
    cache.steady = range(10, 16)
    update(cache, 10)
    sizes = [update(cache, 1)[0].shape[2] for _ in range(7)]
    assert sizes == [9, 10, 11, 12, 13, 14, 9]


def test_h2o_counts_the_attention_of_all_queries_and_evicts_counts_with_entries():
    keys, _, queries = rows(0, 20)
    received = np.asarray(reference.votes(queries, keys, range(20), SCALE))
    for cuts in ([20], [5, 15], [7, 1, 1, 1, 9, 1]):
        cache = make_cache(H2O(), budget=12, n_window=2, block=20)
        for n in cuts:
            feed(cache, n)
        assert np.allclose(cache.held().received_attention, received, atol=1e-5)
        cache.evict()
        kept = np.asarray(cache.positions).astype(int)
        wanted = np.take_along_axis(received.reshape(B, H, 20), kept, axis=-1)
        assert np.allclose(cache.held().received_attention, wanted, atol=1e-5)


def test_the_last_queries_vote_at_an_eviction_without_those_of_undone_tokens():
    cache = make_cache(TOVA(), budget=6, n_window=1, block=6)
    feed(cache, 6), feed(cache, 3)
    restore = cache.restorer()
    feed(cache, 2)
    restore()
    feed(cache, 1)
    keys, _, queries = rows(0, 10)
    last = range(9, 10)
    votes = reference.votes(queries[:, :, -1:], keys, last, SCALE).mean(axis=1)[0]
    cache.evict()
    assert cache.positions[0, 0].tolist() == reference.select(votes, 0, 5, 1)
