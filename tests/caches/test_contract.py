"""Every kind of cache fulfils the whole contract, and undone updates leave no trace."""

import copy
import tempfile

import mlx.core as mx
import numpy as np
import pytest
from cache_kinds import EVICTING, FULL, HOLDING, KINDS, START, STATES, VOTING, fed, feed, rows
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import ArraysCache, load_prompt_cache, save_prompt_cache

from mlx_snapkv import BlockKVCache
from mlx_snapkv.caches.adapter import full_cache, has_all_entries, layer_cache
from mlx_snapkv.caches.matching import mismatch
from mlx_snapkv.engine.loop_model import split_at_evictions
from mlx_snapkv.entries.entries import Entries
from mlx_snapkv.entries.quantization import flat_arrays


def feed_split(cache, n):
    """Feed `n` tokens in pieces that the cache can take. Return the lengths of the pieces."""
    pieces = []

    def model(inputs, cache):
        pieces.append(inputs.shape[1])
        feed(cache[0], inputs.shape[1])
        return inputs

    split_at_evictions(model, [cache])(mx.zeros((1, n)), cache=[cache])
    return pieces


def assert_same(cache, other):
    """Assert that two caches give equal outputs for further tokens, and contain equal entries afterwards.

    Windows evict entries as tokens are added, so differences in hidden entries show up as well.
    """
    for n in (1, 3, 1, 1, 2, 1, 1, 1):
        for c in map(layer_cache, (cache, other)):
            n = int(min(n, c.room if c.room > 0 else c.block))
        assert mx.allclose(feed(cache, n), feed(other, n), atol=1e-5)
    if has_all_entries(cache):
        assert cache.offset == other.offset and layer_cache(cache).room == layer_cache(other).room
        mine, theirs = layer_cache(cache).held(), layer_cache(other).held()
        assert mx.array_equal(mine.positions, theirs.positions)
        stored = (
            [*flat_arrays(x.stored_keys), *flat_arrays(x.stored_values)] for x in (mine, theirs)
        )
        assert all(map(mx.array_equal, *stored))
        if mine.received_attention is not None or theirs.received_attention is not None:
            assert mx.allclose(mine.received_attention, theirs.received_attention, atol=1e-5)


@pytest.mark.parametrize("kind", HOLDING)
def test_entries_are_held_in_order_with_their_positions(kind):
    cache, other = HOLDING[kind](), HOLDING[kind]()
    for n in (1, 3, 1):
        for c in (cache, other):
            feed_split(c, n)
        layer = layer_cache(cache)
        entries = layer.held()
        positions = np.array(entries.positions).astype(int)
        assert layer.n_entries == len(entries) == positions.shape[2]
        assert (np.diff(positions) > 0).all() and (positions[..., -1] == layer.offset - 1).all()
        atol = 0.05 if "8 bits" in kind else 0
        for stored, every in zip((entries.keys, entries.values), rows(0, layer.offset)):
            wanted = np.take_along_axis(np.array(every), positions[..., None], axis=2)
            assert np.allclose(stored, wanted, atol=atol)
    mine, theirs = saved(cache) if kind in EVICTING else copy.deepcopy(cache), other
    assert_same(mine, theirs)  # reading, saving and copying have changed nothing


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_and_flags(kind):
    layer = layer_cache(KINDS[kind]())
    assert layer.is_compressed == layer.stacks == (kind in EVICTING)
    assert layer.observes == (kind in VOTING or "counts" in kind)
    if kind in STATES:
        assert layer.kv_nbytes == 0
        return
    of_one = sum(x.nbytes for x in rows(0, 1)[:2])
    assert layer.offset == START and layer.full_nbytes == START * of_one
    in_file = "file" in kind
    assert layer.file_nbytes == in_file * START * of_one
    share = 0.31 if "8 bits" in kind else 1
    assert (in_file and layer.kv_nbytes == 0) or layer.kv_nbytes >= share * layer.n_entries * of_one


@pytest.mark.parametrize("kind", HOLDING)
def test_n_after_next_is_the_number_of_entries_after_one_more_token(kind):
    cache = HOLDING[kind]()
    for _ in range(10):
        expected = layer_cache(cache).n_after_next
        feed(cache, 1)
        assert layer_cache(cache).n_entries == expected


@pytest.mark.parametrize("kind", [*FULL, *STATES])
def test_trimmed_and_restored_updates_leave_no_trace(kind):
    """For caches that evict, see `test_a_cache_after_any_steps_equals_one_that_was_only_fed`."""
    for n in range(1, 7) if kind in FULL else (6,):
        cache, other = KINDS[kind](), KINDS[kind]()
        for c in (cache, other):
            feed(c, 1)
        layer = layer_cache(cache)
        assert layer.grows == (kind in FULL)
        restore = layer.restorer()
        for update in (2, 1, 3):
            feed_split(cache, update)
        if n < 6:
            assert layer.trim(n) == n
        else:
            restore()
        for _ in range(6 - n):
            feed(other, 1)
        assert_same(cache, other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_can_be_restored_any_number_of_times(kind):
    cache, other = KINDS[kind](), KINDS[kind]()
    restore = layer_cache(cache).restorer()
    for n in (1, 20, 7):
        feed_split(cache, n)
        restore()
    assert_same(cache, other)


def test_wrong_positions_and_arrays_of_rotating_caches_and_states_are_problems():
    """For other problems, see `tests/saved/test_files.py`."""
    keys, values, _ = rows(0, 1)
    like = full_cache(Entries(keys, values))
    cache = EVICTING["block of 8 bits"]()
    feed(cache, 3)
    assert mismatch(cache, like) is None
    for wrong in (mx.zeros_like(cache._kept_positions), cache._kept_positions + 1000):
        cache._kept_positions = wrong
        assert "positions that can't be" in mismatch(cache, like)
    rotating, state = (make() for make in reversed(STATES.values()))
    assert mismatch(rotating, like) is None
    rotating.keys = rotating.keys[:, :, 1:]
    assert mismatch(rotating, like)
    other = fed(ArraysCache(2))
    assert mismatch(state, other) is None
    state[0] = mx.zeros((3,))
    assert mismatch(state, other)


def saved(cache):
    """Save the cache with mlx-lm, and return it as loaded again."""
    with tempfile.TemporaryDirectory() as folder:
        save_prompt_cache(f"{folder}/cache.safetensors", [cache])
        (loaded,) = load_prompt_cache(f"{folder}/cache.safetensors")
        mx.eval(loaded.state)
    assert type(loaded) is type(cache) and not loaded.is_trimmable()
    assert loaded.observes == cache.observes
    if isinstance(cache, BlockKVCache):
        assert str(loaded.policy) == str(cache.policy)
    return loaded


STEPS = st.one_of(
    st.tuples(st.just("feed"), st.integers(1, 10)),
    st.tuples(st.sampled_from(["note", "restore", "copy", "save"]), st.just(0)),
)


@settings(max_examples=80)
@given(
    kind=st.sampled_from([kind for kind in EVICTING if kind not in VOTING]),
    steps=st.lists(STEPS, min_size=1, max_size=12),
)
def test_a_cache_after_any_steps_equals_one_that_was_only_fed(kind, steps):
    cache, replayed = EVICTING[kind](), EVICTING[kind]()
    # Lengths of the pieces that were fed and not undone; a restorer with the pieces fed before it.
    pieces, noted = [], None
    for name, n in steps:
        assert not cache.is_trimmable()  # True would let mlx-lm trim any number of tokens
        if name == "feed":
            pieces += feed_split(cache, n)
        elif name == "note":
            noted = cache.restorer(), list(pieces)
        elif name == "restore" and noted:
            noted[0]()
            pieces = list(noted[1])
        elif name == "copy":
            other, cache, noted = cache, copy.deepcopy(cache), None
            feed_split(other, 7)  # must not change the copy
        elif name == "save":
            cache, noted = saved(cache), None
    for n in pieces:
        feed_split(replayed, n)
    assert_same(cache, replayed)
